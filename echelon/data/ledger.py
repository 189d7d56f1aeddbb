"""The ledger: which samples were committed, an epoch at a time. Every sample of an epoch's order exactly once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from echelon.data.loader import Part


@dataclass
class EpochLedger:
    """Counts over the whole world; ids of this rank's own parts where they are kept."""

    planned: int = 0
    committed: int = 0
    ids: list[Any] = field(default_factory=list)


class Ledger:
    """One loader's ledger. `keep_ids` makes it remember this rank's committed sample ids (tests, audits)."""

    def __init__(self) -> None:
        self.epochs: dict[int, EpochLedger] = {}
        self.keep_ids = False
        self._seen: set[tuple[int, int, int]] = set()

    def plan(self, part: Part) -> None:
        """A part is yielded; once more after a loss counts once."""
        micro = part.micro
        key = (micro.epoch, micro.batch, micro.slice)
        if key not in self._seen:
            self._seen.add(key)
            self.epochs.setdefault(micro.epoch, EpochLedger()).planned += len(micro.ids)

    def unplan(self, part: Part) -> None:
        """A part that was yielded comes again: until then it is not planned."""
        micro = part.micro
        key = (micro.epoch, micro.batch, micro.slice)
        if key in self._seen:
            self._seen.discard(key)
            self.epochs[micro.epoch].planned -= len(micro.ids)

    def commit(self, part: Part, rank: int, size: int) -> None:
        """The step that this part belongs to was applied."""
        micro = part.micro
        self._seen.discard((micro.epoch, micro.batch, micro.slice))
        entry = self.epochs.setdefault(micro.epoch, EpochLedger())
        entry.committed += len(micro.ids)
        if self.keep_ids:
            lo, hi = micro.dealt(rank, size)
            entry.ids.extend(micro.ids[lo:hi])
