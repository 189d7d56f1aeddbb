"""Lists for the steps of a pipeline, with shares that follow what micro-batches were seen to take. Pure.

All ranks learn the same numbers after each step, so all have the same lists for the next. After a lost step all of them forget:
one that was started again knows nothing either.
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.parallel.pipeline import replicas
from echelon.parallel.pipeline.schedule import Orders, Schedule

NEW = 0.3
"""How much the last step counts for in what a micro-batch takes: one slow step changes little."""

WARM = 1
"""Steps that are not learned from: the first one allocates, and measures."""

Pace = tuple[tuple[float, ...], ...]
"""Seconds that a micro-batch takes on each worker of each stage."""


class Dealer:
    """See above. It is a Keeper: `put_back` forgets."""

    def __init__(
        self,
        schedule: Schedule,
        widths: Sequence[int],
        chunks: int = 1,
        speeds: Sequence[Sequence[float]] = (),
    ) -> None:
        """`speeds` of each worker of each stage, where they were named: then nothing is learned."""
        self.schedule, self.widths, self.chunks = schedule, tuple(widths), chunks
        self.named: Pace | None = tuple(tuple(sum(s) / each for each in s) for s in speeds) or None
        self.pace: Pace | None = None
        """What the lists are made for; None: as if all stages were equally busy."""
        self.put_back()

    def keep(self) -> None:
        pass

    def put_back(self) -> None:
        self._forget(self.named)
        self._seen: list[float] = []
        self._num_seen = 0

    def _forget(self, pace: Pace | None) -> None:
        self.pace = pace
        self._orders: dict[int, Orders] = {}

    def orders(self, micros: int) -> Orders:
        """The lists of all workers for a step of so many micro-batches."""
        if micros not in self._orders:
            self._orders[micros] = replicas.orders(
                self.schedule, self.widths, micros, self.chunks, seconds=self.pace
            )
        return self._orders[micros]

    def learn(self, micros: int, seconds: Sequence[float]) -> bool:
        """What a micro-batch of the last step took on each worker, 0 where there was none. True when shares are dealt anew:
        only if that makes a step of so many micro-batches clearly shorter for the workers of a stage."""
        self._num_seen += 1
        if max(self.widths) == 1 or self.named or self._num_seen <= WARM:
            return False
        before = self._seen or [0.0] * len(seconds)
        self._seen = [
            new if not old else old if not new else (1 - NEW) * old + NEW * new
            for old, new in zip(before, seconds, strict=True)
        ]
        found = self._by_stage()
        if found is None:
            return False
        for stage, width in enumerate(self.widths):
            counts = replicas.shared(
                micros, [1 / s for s in self.pace[stage]] if self.pace else [1.0] * width
            )
            if replicas.redealt(counts, found[stage]) != counts:
                self._forget(found)
                return True
        return False

    def _by_stage(self) -> Pace | None:
        """Those that never had a micro-batch are taken for as fast as the fastest beside them; None if nobody of a stage had one."""
        found, at = [], 0
        for width in self.widths:
            some = self._seen[at : at + width]
            known = [s for s in some if s]
            if not known:
                return None
            found.append(tuple(s or min(known) for s in some))
            at += width
        return tuple(found)
