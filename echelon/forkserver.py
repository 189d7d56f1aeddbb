"""One process of a host that imports torch and what roles need, once, and forks the roles.

`python -m echelon.role forkserver --socket-fd N --room …`, started by the guard. Requests come on its socket, one JSON object
each, with the role's descriptors: {"id", "argv", "env", "cwd"}. Answers: {"forked": id, "pid"}, and {"cold": why} when this process cannot fork. It ends
with its socket.

Of a role it makes what exec would have made: environment, command line (also as /proc shows them), descriptors, process
group, folder. It is forked twice, so that it becomes a child of the guard, and waits until the guard is its parent
before it sets the signal that it dies with.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import gc
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from echelon import env, preload

MESSAGE_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1

ARGUMENTS, ENVIRONMENT = 48, 50
"""Fields of /proc/self/stat, from 1, that say where an area begins; the field after each says where it ends."""


@dataclass(frozen=True)
class Area:
    """A piece of this process's memory that /proc shows: its command line, or the environment it was started with."""

    start: int
    end: int

    def write(self, words: Sequence[str]) -> None:
        """Puts these words there, each with its NUL, and fills the rest with NULs; words that do not fit are left out."""
        text, room = b"", self.end - self.start
        for word in words:
            more = os.fsencode(word) + b"\0"
            if len(text) + len(more) <= room:
                text += more
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(self.start)
            memory.write(text.ljust(room, b"\0"))


def area(first_field: int) -> Area:
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    return Area(int(fields[first_field - 3]), int(fields[first_field - 2]))


def serve(fd: int, imports: Sequence[str]) -> list[str]:
    """In the fork server this never returns. In a role that it forked it returns the arguments after `python -m echelon.role`."""
    server = socket.socket(fileno=fd)
    guard = os.getppid()
    gc.disable()  # what is imported stays: looking through it again and again took a fifth of the time
    why = _why_cold(imports)
    if why:
        _tell(server, {"cold": why})
        _wait_for_end(server)
    gc.freeze()  # what is here now stays shared: no collection touches its pages
    gc.enable()
    while True:
        data, ancillary, _, _ = server.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(4 * 8))
        if not data:
            os._exit(0)
        fds = array.array("i")
        for level, kind, blob in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(blob[: len(blob) - len(blob) % fds.itemsize])
        message = json.loads(data)
        argv = _fork(server, message, list(fds), guard)
        if argv is not None:
            return argv
        for each in fds:
            os.close(each)


def _why_cold(imports: Sequence[str]) -> str:
    """Why this process must not fork roles; "" when it may."""
    try:
        if not all(each.start < each.end for each in (area(ARGUMENTS), area(ENVIRONMENT))):
            return "/proc does not tell where a command line lies"
        with open("/proc/self/mem", "r+b", buffering=0):
            pass
        why = preload.load(imports)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return why or _threads()


def _threads() -> str:
    """The names of the threads beside this one; "" when there are none."""
    mine = str(os.getpid())
    others = [task for task in os.listdir("/proc/self/task") if task != mine]
    if not others:
        return ""
    known = {str(each.native_id): each.name for each in threading.enumerate()}
    names = []
    for task in others:
        with contextlib.suppress(OSError):
            names.append(known.get(task) or Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return f"a thread is there before the fork: {', '.join(sorted(names))}" if names else ""


def _wait_for_end(server: socket.socket) -> NoReturn:
    """The guard closes the socket once it has heard why."""
    while server.recv(MESSAGE_BYTES):
        pass
    os._exit(0)


def _fork(server: socket.socket, message: dict[str, Any], fds: list[int], guard: int) -> list[str] | None:
    """Forks one role, twice. None in the fork server; in the role its arguments."""
    go_out, go_in = os.pipe2(os.O_CLOEXEC)
    pid_out, pid_in = os.pipe2(os.O_CLOEXEC)
    between = os.fork()
    if between == 0:
        try:
            role = os.fork()
        except OSError:
            os._exit(1)
        if role != 0:
            os.write(pid_in, str(role).encode())
            os._exit(0)
        try:
            for end in (go_in, pid_out, pid_in):
                os.close(end)
            server.close()
            return _take_place(message, fds, go_out, guard)
        except BaseException as error:
            os.write(2, f"cannot start {message['argv']}: {error}\n".encode())
            os._exit(127)
    os.close(go_out)
    os.close(pid_in)
    os.waitpid(between, 0)
    text = os.read(pid_out, 32)
    os.close(pid_out)
    _tell(
        server,
        {"forked": message["id"], "pid": int(text)} if text else {"cold": "no process could be forked"},
    )
    os.close(go_in)  # its parent is the guard by now
    return None


def _tell(server: socket.socket, answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the guard has gone: so will this process, and what it forked
        server.send(json.dumps(answer).encode())


def _take_place(message: dict[str, Any], fds: list[int], go: int, guard: int) -> list[str]:
    """Makes this process the role that the message describes."""
    os.read(go, 1)  # returns when the process between has ended
    os.close(go)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != guard:
        os._exit(127)
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDONLY)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (null, *fds)]
    for fd in (null, *fds):
        if fd > 2:
            os.close(fd)
    for target, fd in enumerate(high):
        os.dup2(fd, target, inheritable=True)
        os.close(fd)
    os.chdir(message["cwd"])
    variables, argv = message["env"], message["argv"]
    environment_area, arguments_area = area(ENVIRONMENT), area(ARGUMENTS)
    before = env.replace(variables)
    environment_area.write([f"{name}={value}" for name, value in variables.items()])
    arguments_area.write(argv)
    sys.orig_argv = list(argv)
    preload.in_role(before)
    return list(argv[argv.index("echelon.role") + 1 :])
