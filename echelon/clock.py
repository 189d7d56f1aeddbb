"""Deadlines, and the one clock they are read from."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]
"""Seconds that only go forward. Tests hand in their own."""

FOREVER_S = 10.0 * 365 * 86400


@dataclass(frozen=True)
class Deadline:
    """A moment by which something must be over. Made at the top, passed down, never renewed on the way."""

    at: float
    clock: Clock = time.monotonic

    @classmethod
    def after(cls, seconds: float, clock: Clock = time.monotonic) -> Deadline:
        return cls(clock() + seconds, clock)

    @property
    def left_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.at - self.clock())

    @property
    def passed(self) -> bool:
        return self.clock() >= self.at

    def sooner(self, seconds: float) -> Deadline:
        """This deadline, or `seconds` from now if that comes first."""
        return Deadline(min(self.at, self.clock() + seconds), self.clock)


class FakeClock:
    """A clock that tests move by hand."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
