"""The supervisor's end of the guard: starts it, asks it to start and end processes, hears of exits."""

from __future__ import annotations

import array
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon import env
from echelon.clock import Deadline
from echelon.errors import UsageError
from echelon.launch import guard
from echelon.launch.guard import MESSAGE_BYTES
from echelon.launch.local import RoleSpec

WAIT_S = 6.0
GRACE_S = 1.0


class Tether:
    """One guard process. When this object's process dies, the guard ends everything below it.

    `fileno` becomes readable when there is something to hear. After the guard died, `gone` is True.
    """

    def __init__(self, log: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
        program = str(Path(__file__).with_name("guard.py"))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the guard's, until it has its handlers
        with theirs, log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", program, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),), start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=file, stderr=file, env=env.without_token(),
            )  # fmt: skip
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        ours.setblocking(False)
        self._socket = ours
        self.gone = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def spawn(self, spec: RoleSpec, fds: Sequence[int]) -> None:
        """Asks for a process with these descriptors as stdout, stderr and (if there is a third) fd 3."""
        message = {"do": "spawn", "id": spec.id, "argv": spec.argv, "env": spec.env, "cwd": os.getcwd()}
        if spec.fork_server is not None:
            message["fork"] = {"argv": spec.fork_server.argv, "env": spec.fork_server.env}
        self._send(message, fds)

    def remove_at_end(self, *paths: Path) -> None:
        self._send({"do": "remove", "paths": [str(path) for path in paths]})

    def end(self, grace_s: float) -> None:
        """Asks for the end of everything: SIGTERM now, SIGKILL after the grace."""
        self._send({"do": "end", "grace_s": grace_s})

    def hear(self) -> list[dict[str, Any]]:
        """The messages that came; does not block."""
        heard: list[dict[str, Any]] = []
        while not self.gone:
            try:
                data = self._socket.recv(MESSAGE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if data:
                heard.append(json.loads(data))
            else:
                self.gone = True
        return heard

    def leave_nothing(self, pids: set[int], spare: frozenset[int]) -> None:
        """Waits for the guard; what it left, because it was killed itself, is ended here. `spare` are not ours."""
        self.end(0.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.5 if self.gone else WAIT_S)
        force_at, seen = time.monotonic() + GRACE_S, pids - {os.getpid()}
        guard.end_descendants(lambda: force_at, _collect, seen, spare)
        guard.remove_segments(seen)
        self._socket.close()

    def _send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._socket.settimeout(5.0)
        try:
            self._socket.sendmsg([json.dumps(message).encode()], rights)
        except (BrokenPipeError, ConnectionError, TimeoutError):
            pass  # the guard is gone or stuck: hear() finds out
        except OSError as error:
            raise UsageError(f"cannot start {message.get('id', 'a process')}: {error}",
                             remedy="The script's arguments may be too long.") from None  # fmt: skip
        finally:
            self._socket.setblocking(False)


def _collect(wait_s: float) -> None:
    """Collects orphans that became ours, or waits a moment for one."""
    deadline = Deadline.after(wait_s)
    with selectors.DefaultSelector() as pause:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                ended = None
            if ended is None:
                if deadline.passed:
                    return
                pause.select(min(0.01, deadline.left_s))
