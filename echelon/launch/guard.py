"""The process between the supervisor and everything it starts: when the supervisor is gone, so is all the rest.

The guard leads its own session, so the terminal's Ctrl-C never reaches the roles, and it is a "subreaper": whatever a
role leaves behind (DataLoader workers, daemons, subprocesses in sessions of their own) becomes its child. It holds one
socket to the supervisor; end of file there means that the supervisor died, and ends the tree.

Messages are one JSON object each (SOCK_SEQPACKET). From the supervisor:
    {"do": "spawn", "id", "argv", "env", "cwd"}   with 2 or 3 descriptors: stdout, stderr, one to become fd 3. With a
        "fork": {"argv", "env"} the process is forked by a server that this command starts (echelon/forkserver.py)
    {"do": "remove", "paths"}                              files to delete at the end
    {"do": "end", "grace_s"}                               end the tree; a second one may shorten the grace
To it: {"started": id, "pid"}, {"exited": id, "pid", "status", "peak_rss_bytes"}, {"asked": n} for a signal to the guard
itself (the supervisor decides; a second one ends the tree at once), {"cold": why} once when processes are started one by
one and not forked, and {"ended": true} last.

This file needs only the standard library and runs as `python -I -S guard.py FD`, so that it starts in 20 ms.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import json
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MESSAGE_BYTES = 1 << 20
PASSED_FD = 3
AGAIN_S = 0.2
CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
"""Helpers that remove shared memory once they see that their clients are gone: they are asked last."""


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def become_subreaper() -> None:
    """From now on orphans among this process's descendants become its own children."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants(root: int) -> set[int]:
    """Every process below `root`, zombies that their parent has not collected yet included."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found: set[int] = set()
    frontier = [root]
    while frontier:
        for pid in children.get(frontier.pop(), ()):
            if pid not in found:
                found.add(pid)
                frontier.append(pid)
    return found


def end_descendants(
    force_at: Callable[[], float],
    turn: Callable[[float], None],
    seen: set[int],
    spare: frozenset[int] = frozenset(),
) -> bool:
    """Blocks until no descendant of this process is left: True, or False after 8 s (a process the kernel holds).

    Each gets SIGTERM, once more after a moment (the first asks a run to stop in good order, and that is over), and SIGKILL
    from the moment `force_at()` on; processes that appear meanwhile as well.
    `turn(seconds)` collects exits and waits at most that long; `seen` gathers the pids; `spare` are not ours.
    """
    asked: dict[int, float] = {}
    give_up = time.monotonic() + 8.0
    cleaners_until: float | None = None
    while True:
        turn(0.0)
        tree = descendants(os.getpid()) - spare
        if not tree:
            return True
        seen |= tree
        now = time.monotonic()
        if now >= give_up:
            return False
        first = {pid for pid in tree if not _is_cleaner(pid)}
        if first:
            force = now >= force_at()
        else:
            first, cleaners_until = tree, cleaners_until or now + 0.5
            force = now >= cleaners_until
            asked |= dict.fromkeys(tree, math.inf)
        for pid in first:
            if force:
                _kill(pid, signal.SIGKILL)
            elif now >= asked.get(pid, 0.0):
                asked[pid] = math.inf if pid in asked else now + AGAIN_S
                _kill(pid, signal.SIGTERM)
                _kill(pid, signal.SIGCONT)
        turn(0.02)


def remove_segments(pids: set[int]) -> None:
    """Deletes the shared-memory files that torch made in these processes."""
    for name in _torch_segments():
        if int(name.split("_")[1]) in pids:
            with contextlib.suppress(OSError):
                os.unlink(f"/dev/shm/{name}")


def _torch_segments() -> list[str]:
    try:
        names = os.listdir("/dev/shm")
    except OSError:
        return []
    return [name for name in names if name.startswith("torch_") and name.split("_")[1].isdigit()]


def _is_cleaner(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            line = file.read()
    except OSError:
        return False
    return any(word in line for word in CLEANERS)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


class ForkServer:
    """The guard's end of the process that forks roles. It is there while a role is wanted, and goes when the last was forked.

    One role at a time is asked for. `unclaimed` are exits of processes that may be roles of which it has not told yet.
    """

    def __init__(self) -> None:
        self.wanted: list[tuple[dict[str, object], list[int]]] = []
        self.socket: socket.socket | None = None
        self.unclaimed: dict[int, tuple[int, int]] = {}
        self.works = True

    def want(self, message: dict[str, object], fds: list[int]) -> None:
        self.wanted.append((message, [os.dup(fd) for fd in fds]))

    def ask(self) -> str:
        """Asks for the first that is wanted; "" or why that cannot be."""
        assert self.socket is not None
        message, fds = self.wanted[0]
        env = dict(os.environ) | message["env"]  # type: ignore[operator]
        request = {"id": message["id"], "argv": message["argv"], "env": env, "cwd": message["cwd"]}
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        try:
            self.socket.sendmsg([json.dumps(request).encode()], rights)
        except OSError as error:
            return f"no role can be asked of the process that forks: {error}"
        return ""

    def hear(self) -> dict[str, object]:
        """Its answer, {"cold": why} when there will be none."""
        assert self.socket is not None
        try:
            data = self.socket.recv(MESSAGE_BYTES)
        except OSError:
            data = b""
        answer: dict[str, object] = (
            json.loads(data) if data else {"cold": "the process that forks them ended"}
        )
        return answer

    def done(self) -> dict[str, object]:
        """The first that is wanted is so no longer; its message."""
        message, fds = self.wanted.pop(0)
        for fd in fds:
            os.close(fd)
        return message

    def close(self) -> None:
        """It ends by itself when its socket is closed."""
        if self.socket is not None:
            self.socket.close()
        self.socket = None
        self.unclaimed.clear()
        while self.wanted:
            self.done()


class Guard:
    """One run's guard: `run()` returns when the tree is gone."""

    def __init__(self, supervisor: socket.socket) -> None:
        self.supervisor = supervisor
        self.roles: dict[int, str] = {}
        self.forks = ForkServer()
        self.seen: set[int] = set()
        self.remove: list[str] = []
        self.force_at: float | None = None
        self.open = True
        self.wake, wake_in = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_in, False)
        signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.asked = 0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: self.ask(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the supervisor held it back until now

    def run(self) -> None:
        become_subreaper()
        while self.force_at is None:
            self.turn(1.0)
            self.look_for_segments()
        end_descendants(lambda: self.force_at or 0.0, self.turn, self.seen)
        remove_segments(self.seen)
        for path in self.remove:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self.tell({"ended": True})

    def turn(self, wait_s: float) -> None:
        """Waits for a message or an exit, at most `wait_s`; handles every message and exit there is."""
        forks = [self.forks.socket] if self.forks.socket is not None else []
        watched: list[int | socket.socket] = [self.wake, *([self.supervisor] if self.open else []), *forks]
        ready, _, _ = select.select(watched, [], [], wait_s)
        if self.wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake, 4096)
        if self.supervisor in ready:
            self.listen()
        if self.forks.socket is not None and self.forks.socket in ready:
            self.hear_forks()
        self.collect()

    def listen(self) -> None:
        try:
            data, ancillary, _, _ = self.supervisor.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(4 * 8))
        except ConnectionError:
            data, ancillary = b"", []
        fds = array.array("i")
        for level, kind, blob in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(blob[: len(blob) - len(blob) % fds.itemsize])
        if not data:
            self.open = False
            self.end(1.0)
            return
        message = json.loads(data)
        if message["do"] == "spawn" and self.force_at is None:
            if "fork" in message and self.forks.works:
                self.fork(message, list(fds))
            else:
                self.spawn(message, list(fds))
        elif message["do"] == "remove":
            self.remove += message["paths"]
        elif message["do"] == "end":
            self.end(message["grace_s"])
        for fd in fds:
            os.close(fd)

    def ask(self, number: int) -> None:
        self.asked += 1
        if self.asked == 1 and self.open:
            self.tell({"asked": number})
        else:
            self.end(1.0)

    def end(self, grace_s: float) -> None:
        at = time.monotonic() + grace_s
        self.force_at = at if self.force_at is None else min(at, self.force_at)
        self.forks.close()

    def spawn(self, message: dict[str, object], fds: list[int]) -> None:
        """Starts it as a program of its own."""
        self.note_start(str(message["id"]), self.execute(message, fds))

    def execute(self, message: dict[str, object], fds: list[int]) -> int:
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                _become(message, fds, parent)
            except BaseException as error:
                os.write(2, f"cannot start {message['argv']}: {error}\n".encode())
            finally:
                os._exit(127)
        self.seen.add(pid)
        return pid

    def fork(self, message: dict[str, object], fds: list[int]) -> None:
        """Asks the fork server for it, which is started when it is not there."""
        self.forks.want(message, fds)
        if self.forks.socket is not None:
            return  # it is asked when those before have been answered
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
        self.forks.socket = ours
        program: dict[str, object] = {**message["fork"], "cwd": message["cwd"]}  # type: ignore[dict-item]
        with theirs:
            self.execute(program, [1, 2, theirs.fileno()])
        why = self.forks.ask()
        if why:
            self.start_cold(why)

    def hear_forks(self) -> None:
        answer = self.forks.hear()
        why = str(answer.get("cold", ""))
        if not why:
            message = self.forks.done()
            if "forked" in answer:
                pid = int(str(answer["pid"]))
                self.note_start(str(message["id"]), pid)
                if pid in self.forks.unclaimed:
                    self.note_exit(pid, *self.forks.unclaimed.pop(pid))
            if self.forks.wanted:
                why = self.forks.ask()
            else:
                self.forks.close()
        if why:
            self.start_cold(why)

    def start_cold(self, why: str) -> None:
        """Those that wait for the fork server, and all that come later, become programs of their own."""
        self.forks.works = False
        self.tell({"cold": why})
        while self.forks.wanted:
            message, fds = self.forks.wanted[0]
            self.spawn(message, fds)
            self.forks.done()
        self.forks.close()

    def collect(self) -> None:
        """Collects every exit there is, and tells those of roles with their memory peak."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.roles:
                self.note_exit(pid, status, usage.ru_maxrss * 1024)
            elif self.forks.wanted:
                self.forks.unclaimed[pid] = (status, usage.ru_maxrss * 1024)

    def note_start(self, id: str, pid: int) -> None:
        self.roles[pid] = id
        self.seen.add(pid)
        self.tell({"started": id, "pid": pid})

    def note_exit(self, pid: int, status: int, peak_rss_bytes: int) -> None:
        self.tell(
            {"exited": self.roles.pop(pid), "pid": pid, "status": status, "peak_rss_bytes": peak_rss_bytes}
        )

    def look_for_segments(self) -> None:
        """Remembers descendants that made shared memory, so that their files can be removed when they were killed."""
        unknown = {int(name.split("_")[1]) for name in _torch_segments()} - self.seen
        if unknown:
            self.seen |= unknown & descendants(os.getpid())

    def tell(self, message: dict[str, object]) -> None:
        if self.open:
            try:
                self.supervisor.send(json.dumps(message).encode())
            except OSError:
                self.open = False
                self.end(1.0)


def _become(message: dict[str, object], fds: list[int], parent: int) -> None:
    """In the new process: dies with the guard, own process group, plain signals, its descriptors, its program."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(127)
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    for number in (
        signal.SIGPIPE,
        signal.SIGXFSZ,
        signal.SIGCHLD,
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
    ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until the role has its handler
    null = os.open(os.devnull, os.O_RDONLY)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (null, *fds)]
    for target, fd in enumerate(high):
        os.dup2(fd, target, inheritable=True)
    env = dict(os.environ) | message["env"]  # type: ignore[operator]
    os.chdir(str(message["cwd"]))
    argv = message["argv"]
    os.execve(argv[0], argv, env)  # type: ignore[index, arg-type]


if __name__ == "__main__":
    os.set_inheritable(
        int(sys.argv[1]), False
    )  # a role that held it would hide our death from the supervisor
    Guard(socket.socket(fileno=int(sys.argv[1]))).run()
