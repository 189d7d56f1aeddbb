"""What the roles print: raw into their files, the workers' as lines onto the screen."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Protocol

from echelon.launch.rundir import RunDir
from echelon.show.holdback import Holdback
from echelon.show.lines import Collapser, Line

LOG_TAIL_LINES = 12
TRACEBACK_LINES = 30
"""A log that ends with a traceback of at most so many lines is shown from its beginning."""


class Screen(Protocol):
    """Where lines go."""

    def lines(self, lines: Sequence[Line]) -> None: ...


class Streams:
    """The pipes of all roles. Belongs to the supervisor's loop, which calls `read` when a pipe is ready."""

    def __init__(
        self, folder: RunDir, selector: selectors.BaseSelector, display: Screen, num_workers: int
    ) -> None:
        self._folder, self._selector, self._display = folder, selector, display
        self._lines = Collapser(num_workers, time.monotonic)
        self._holdback = Holdback(time.monotonic)
        self._logs: dict[str, IO[bytes]] = {}
        self._pipes: dict[str, list[tuple[int, str]]] = {}

    def expect(self, num_workers: int) -> None:
        """How many workers speak here, now that it is known; before the first of them is opened."""
        self._lines = Collapser(num_workers, time.monotonic)

    def far(self, line: Line) -> None:
        """A line that another host's worker wrote."""
        self._show([line])

    def open(self, role: str, rank: int) -> list[int]:
        """Pipes for a new process; gives the ends that it writes to (stdout, stderr), for the caller to close."""
        id = f"{role}-{rank}"
        if role == "worker":
            self._lines.start(rank)
        if id not in self._logs:
            self._logs[id] = self._folder.log(role, rank).open("ab", buffering=0)
        writers = []
        for stream in ("out", "err"):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            writers.append(writer)
            self._pipes.setdefault(id, []).append((reader, stream))
            self._selector.register(reader, selectors.EVENT_READ, (id, reader, stream))
        return writers

    def read(self, id: str, fd: int, stream: str) -> bool:
        """Takes one piece; False when there is nothing more now."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(fd)
            self._pipes[id].remove((fd, stream))
            os.close(fd)
            return False
        with contextlib.suppress(OSError):  # a full disk costs the log, not the run
            self._logs[id].write(data)
        role, _, rank = id.rpartition("-")
        if role == "worker":
            self._show(self._lines.feed(int(rank), stream, data))
        return True

    def tick(self) -> None:
        self._show(self._lines.due())

    def over(self, role: str, rank: int) -> None:
        """The process is over: takes what it left. Its children may still hold the pipe; they are heard later."""
        self._drain(f"{role}-{rank}")
        if role == "worker":
            self._show(self._lines.finish(rank))

    def failing(self) -> None:
        """From now on the workers' stderr is held back until the end."""
        self._holdback.failing()

    def finish(self, told: Iterable[str]) -> None:
        """Shows everything that is left, less the tracebacks that were `told`; closes all files."""
        for id in self._pipes:
            self._drain(id)
        self._show(self._lines.flush())
        self._display.lines(self._holdback.rest(told))
        for log in self._logs.values():
            log.close()

    def _drain(self, id: str) -> None:
        for fd, stream in list(self._pipes.get(id, ())):
            while self.read(id, fd, stream):
                pass

    def _show(self, lines: list[Line]) -> None:
        self._display.lines(self._holdback.pass_on(lines))


def tail(path: Path) -> list[str]:
    """The last lines of a log for people; of a crash the Python stack, without the frames that started the script."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return tail_lines(text)


def tail_lines(text: str) -> list[str]:
    lines = [line.rpartition("\r")[2] for line in text.splitlines() if line.strip()]
    fatal = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error")]
    if fatal:
        crash = lines[fatal[-1] :]
        start = next((i for i, line in enumerate(crash) if line.startswith("Current thread")), 0)
        stack = [line for line in crash[start + 1 :] if line.startswith("  File ")]
        own = os.path.join("echelon", "role.py")
        return [crash[0], *(line for line in stack if own not in line and "<frozen runpy>" not in line)][
            :LOG_TAIL_LINES
        ]
    raised = [i for i, line in enumerate(lines) if line.startswith("Traceback ")]
    if raised and len(lines) - raised[-1] <= TRACEBACK_LINES:
        return lines[raised[-1] :]
    return lines[-LOG_TAIL_LINES:]
