"""Keeps tracebacks off the screen until it is known whether one of them is the failure that is told last. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from echelon.clock import Clock
from echelon.show.lines import Line

HOLD_S = 1.0
TRACEBACK = "Traceback (most recent call last):"


class Holdback:
    """Lines go in, those that may be shown come out. After failing() nothing of the workers' stderr comes out until rest()."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: list[Line] = []
        self._since: dict[int, float] = {}
        self._failing = False

    def pass_on(self, lines: Sequence[Line]) -> list[Line]:
        """The lines that may be shown now. A worker's traceback is held for HOLD_S, and what it writes after it."""
        now, free = self._clock(), []
        if not self._failing and any(now - since >= HOLD_S for since in self._since.values()):
            free, self._held = self._held, []
            self._since.clear()
        for line in lines:
            if line.stream == "err" and line.text.startswith(TRACEBACK):
                for rank in line.ranks:
                    self._since.setdefault(rank, now)
            if line.stream == "err" and (self._failing or any(rank in self._since for rank in line.ranks)):
                self._held.append(line)
            else:
                free.append(line)
        return free

    def failing(self) -> None:
        """A worker failed: its words come last, the others' are consequences."""
        self._failing = True

    def rest(self, told: Iterable[str]) -> list[Line]:
        """What was held, less the lines of the tracebacks that were `told` otherwise."""
        known = {line.rstrip() for text in told for line in text.splitlines()}
        held, self._held = self._held, []
        return [line for line in held if line.text.rstrip() not in known]
