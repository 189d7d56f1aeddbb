"""Signals that ask a run to end, and how the loop that acts on them is woken."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

AT_ONCE_S = 0.8

WORDS = {
    signal.SIGINT: "stopped by Ctrl-C",
    signal.SIGTERM: "stopped by SIGTERM",
    signal.SIGHUP: "stopped, because the terminal went away",
}


@dataclass(frozen=True)
class Stop:
    """Why everything is to end, other than a worker's failure or success."""

    code: int
    reason: str
    detail: tuple[str, ...] = ()
    block: tuple[str, ...] = ()
    """The last lines, if they are to say more than `reason`."""


class Waker:
    """A pipe that wakes a loop: `wake` from anywhere, a signal through `fd`, and `drain` in the loop."""

    def __init__(self) -> None:
        self._out, self.fd = os.pipe()
        for end in (self._out, self.fd):
            os.set_blocking(end, False)

    def fileno(self) -> int:
        return self._out

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self.fd, b"x")

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._out, 4096)


class Asked:
    """Counts requests. The handlers only take notes: the loop, woken through `wake_fd`, acts on them."""

    def __init__(self) -> None:
        self.times = 0
        self.number = 0
        self._first = 0.0

    def note(self, number: int) -> None:
        """Ctrl-C after a polite request counts as Ctrl-C. Schedulers send SIGTERM to every process of a job at once: what
        the guard hears then is not a second request."""
        now = time.monotonic()
        if number == self.number == signal.SIGTERM and now - self._first < AT_ONCE_S:
            return
        self._first = self._first or now
        self.times += 1
        self.number = number if number != signal.SIGTERM or not self.number else self.number

    def stop(self) -> Stop:
        return Stop(128 + self.number, WORDS[signal.Signals(self.number)])

    @contextlib.contextmanager
    def listening(self, wake_fd: int) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self.note(number)

        before = {number: signal.signal(number, note) for number in WORDS}
        woken = signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(woken)
            for number, handler in before.items():
                signal.signal(number, handler)
