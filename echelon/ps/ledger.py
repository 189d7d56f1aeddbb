"""The ledger of an epoch's pieces where they are dealt as workers ask: every piece counts exactly once. Pure.

    waiting -> out (with a worker) -> held (its part is here) -> counted (in an update)

A piece is a number; the data engine knows which samples it means. What comes back is dealt before what was never dealt,
in the order of numbers, so no sample is put off for ever.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class Ledger:
    """One epoch at a time: `open` the next when `complete`."""

    def __init__(self, pieces: Iterable[int] = ()) -> None:
        self._waiting: list[int] = sorted(pieces)
        self._out: dict[int, int] = {}
        self._held: set[int] = set()
        self._counted: dict[int, int] = {}
        self.returned = 0
        """Pieces that came back, so far: work that was done for nothing."""

    def open(self, pieces: Iterable[int]) -> None:
        """The next epoch's pieces; numbers are never used again."""
        if not self.complete:
            raise ValueError(f"{self.left} pieces of the epoch are not counted yet")
        self._waiting = sorted(pieces)
        again = self._counted.keys() & set(self._waiting)
        if again:
            raise ValueError(f"piece {min(again)} was counted already")

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def left(self) -> int:
        """Pieces that are in no update yet."""
        return len(self._waiting) + len(self._out) + len(self._held)

    @property
    def complete(self) -> bool:
        return self.left == 0

    def holders(self) -> tuple[int, ...]:
        """Workers that compute on some piece."""
        return tuple(sorted(set(self._out.values())))

    def deal(self, worker: int, most: int = 1) -> tuple[int, ...]:
        """Up to `most` pieces, the lowest numbers first."""
        taken = tuple(heapq.heappop(self._waiting) for _ in range(min(most, len(self._waiting))))
        self._out.update(dict.fromkeys(taken, worker))
        return taken

    def hold(self, pieces: Iterable[int]) -> None:
        """Their part is here: they stay, even if the worker goes."""
        for piece in pieces:
            del self._out[piece]
            self._held.add(piece)

    def count(self, pieces: Iterable[int], step: int) -> None:
        """They are in update `step`."""
        for piece in pieces:
            self._held.remove(piece)
            self._counted[piece] = step

    def counted_in(self, piece: int) -> int | None:
        """The update that it is in; None if in none, or if nobody can go back there any more."""
        return self._counted.get(piece)

    def give_back(self, pieces: Iterable[int]) -> tuple[int, ...]:
        """Not used: they wait again."""
        back = tuple(pieces)
        for piece in back:
            del self._out[piece]
            heapq.heappush(self._waiting, piece)
        self.returned += len(back)
        return back

    def undo(self, version: int) -> tuple[int, ...]:
        """Updates from `version` on never happened, and whatever is held or out is dropped: all of it waits again."""
        undone = [piece for piece, step in self._counted.items() if step >= version]
        back = tuple(sorted([*undone, *self._out, *self._held]))
        for piece in undone:
            del self._counted[piece]
        self._out.clear()
        self._held.clear()
        for piece in back:
            heapq.heappush(self._waiting, piece)
        self.returned += len(back)
        return back

    def settle(self, version: int) -> None:
        """Updates before `version` stay: they need not be remembered."""
        self._counted = {piece: step for piece, step in self._counted.items() if step >= version}
