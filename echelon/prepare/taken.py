"""A loader whose pieces are taken as workers ask for them (async, backup): what its feed does about that."""

from __future__ import annotations

from typing import Any

from echelon.data.deal import Cut, Deal, Done, Takes
from echelon.data.ledger import Ledger
from echelon.step import Machine


class TakesPieces:
    """A part of loader.Feed. Nothing here happens where batches are cut over the workers (`deal` is None)."""

    deal: Deal | None
    cut: Cut
    machine: Machine
    ledger: Ledger
    loops: list[Any]

    def _take(self, epoch: int, total: int | None, done: Done) -> Takes:
        assert self.deal is not None
        takes = self.deal.begin(epoch, total, done)
        takes.before_wait, takes.after_wait = self._settle, self._fresh
        return takes

    def _settle(self) -> None:
        """This worker is about to wait for a piece: what it has stepped on must count by then."""
        if self.machine.committed:
            for loader in self.machine.loaders:
                loader.mark()

    def _fresh(self) -> None:
        """It waited, and others went on meanwhile."""
        for sync in self.machine.syncs if not self.machine.following() else ():
            sync.fresh()

    def samples(self) -> int:
        return sum(part.count for loop in self.loops for part in loop.uncommitted)

    def drop(self) -> None:
        for loop in self.loops:
            for part in loop.uncommitted:
                self.ledger.unplan(part)
            if loop.takes is not None:
                loop.takes.drop([part.micro.batch for part in loop.uncommitted])
            loop.uncommitted = []

    def held(self) -> list[list[int]]:
        """[loader, epoch, piece] of what was yielded since the last commit."""
        number = self.deal.number if self.deal is not None else 0
        return [
            [number, part.micro.epoch, part.micro.batch]
            for loop in self.loops
            if loop.takes is not None
            for part in loop.uncommitted
            if part.micro.last
        ]

    def leave(self) -> None:
        """The run stops: others may still have what this worker did not use."""
        self._settle()
        for loop in self.loops:
            if loop.takes is not None:
                loop.takes.leave()

    def _dealt_so_far(self) -> dict[int, list[Any]]:
        """Epoch -> how it was cut, and which of its pieces are done: of all that somebody began."""
        if self.deal is None:
            return {}
        return {
            epoch: [self.cut.accumulate, self.cut.pieces, *state]
            for epoch, state in self.deal.states().items()
        }
