"""Which recorded operations the value of one storage hangs on: pure.

An operation reads some storages and writes others. What a storage holds at a moment follows from the operations before it that wrote to
it, and from what these read, and so on. An operation that fills a storage whole makes all that was written there before worthless."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Touches:
    """The storages that one operation touches, by number."""

    reads: frozenset[int] = frozenset()
    """Whose content it needs; what it changes in part is among them."""

    writes: frozenset[int] = frozenset()
    creates: frozenset[int] = frozenset()
    """Written for the first time: they did not exist before."""

    fills: frozenset[int] = frozenset()
    """Existed before, and nothing of their old content matters: every byte is written."""


@dataclass
class Chain:
    """What has to be done, in order, to have the wanted storages."""

    operations: list[int] = field(default_factory=list)
    blank: set[int] = field(default_factory=set)
    """Storages that are filled before anybody reads them: room is enough, whatever made them is not done."""

    last_use: dict[int, int] = field(default_factory=dict)
    """By storage: the position in `operations` after which it may be freed; wanted ones are not in it."""


class History:
    """Who wrote what, in the order of the program. Grows while a program is recorded."""

    def __init__(self) -> None:
        self.touches: list[Touches] = []
        self._writers: dict[int, list[int]] = {}

    def add(self, touches: Touches) -> None:
        for storage in touches.writes | touches.creates | touches.fills:
            self._writers.setdefault(storage, []).append(len(self.touches))
        self.touches.append(touches)

    def chain(self, wanted: Iterable[int], before: int | None = None) -> Chain:
        """What the wanted storages hold before operation number `before` (default: at the end)."""
        end = len(self.touches) if before is None else before
        kept = set(wanted)
        needed: set[int] = set()
        blank: set[int] = set()
        ahead: list[int] = []  # numbers of operations, negative: the latest comes first
        chosen: set[int] = set()

        def need(storage: int, before: int) -> None:
            blank.discard(storage)  # somebody earlier reads what was there before it was filled
            needed.add(storage)
            writers = self._writers.get(storage, ())
            at = bisect_left(writers, before) - 1
            if at >= 0 and writers[at] not in chosen:
                chosen.add(writers[at])
                heapq.heappush(ahead, -writers[at])

        for storage in kept:
            need(storage, end)
        done: list[int] = []
        while ahead:
            number = -heapq.heappop(ahead)
            touched = self.touches[number]
            hit = (touched.writes | touched.creates | touched.fills) & needed
            if not hit:
                continue  # it was of interest to a storage that has been filled since
            done.append(number)
            needed -= touched.creates
            needed -= touched.fills
            blank |= touched.fills
            for storage in touched.reads | touched.writes:
                need(storage, number)
        done.reverse()
        return Chain(done, blank, self._last_uses(done, kept))

    def _last_uses(self, operations: Sequence[int], kept: set[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        for position, number in enumerate(operations):
            touched = self.touches[number]
            for storage in touched.reads | touched.writes | touched.creates | touched.fills:
                found[storage] = position
        return {storage: position for storage, position in found.items() if storage not in kept}
