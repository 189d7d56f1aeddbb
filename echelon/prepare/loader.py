"""The loader that a script holds: still a DataLoader of the script's length, dataset and batch size.

Iterating it yields this rank's part of every global batch, tells the machine which one, and starts again where the
last commit was when a step is lost.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from echelon.comm.group import Group
from echelon.data import tree
from echelon.data.deal import Cut
from echelon.data.ledger import Ledger
from echelon.data.loader import MapParts, Part
from echelon.data.streams import StreamParts
from echelon.events import EpochDone
from echelon.step import Machine


class Parts(Protocol):
    """Where parts come from: a map-style dataset or a stream."""

    def epoch(self, epoch: int, again: list[Part]) -> Iterator[Part]: ...
    def rewind(self, again: list[Part]) -> None: ...
    def kept(self, part: Part) -> Part: ...


class Feed:
    """One prepared loader's engine: epochs, marks and rewinds."""

    def __init__(
        self,
        loader: DataLoader[Any],
        cut: Cut,
        seed: int,
        group: Group,
        device: torch.device,
        machine: Machine,
        trains: bool = True,
    ) -> None:
        self.user, self.cut, self.device, self.machine = loader, cut, device, machine
        streams = isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None
        self.parts: Parts = StreamParts(loader, cut, seed, group) if streams else MapParts(loader, cut, seed)
        self.index = len(machine.loaders)
        if trains:
            machine.loaders.append(self)
        self.ledger = Ledger()
        self.epochs = 0
        self.part: Part | None = None
        self.uncommitted: list[Part] = []
        """Yielded since the last commit; an epoch's end changes nothing about that."""
        self.owed: list[Part] = []
        """Lost after the loop had ended: the next loop begins with these."""
        self.iterating = False
        self.seen_activity = 0
        self.rank_samples = 0
        """Samples of this rank in the loop that runs, or ran last."""

    def iterate(self) -> Iterator[Any]:
        """One epoch, as a script's `for` sees it."""
        epoch, self.epochs = self.epochs, self.epochs + 1
        owed, self.owed = self.owed, []
        parts = self.parts.epoch(epoch, owed)
        self.rank_samples = 0
        self.iterating, whole = True, False
        try:
            while (part := self._fetch(parts)) is not None:
                data = self._placed(part.data)
                self.part = part
                self.machine.begin(self, part)
                if not self.uncommitted:
                    self.seen_activity = self.machine.activity()
                self.uncommitted.append(self.parts.kept(part))
                self.ledger.plan(part)
                self.rank_samples += part.count
                yield data
            whole = True
        finally:
            self.iterating = False
            self._end(epoch, whole)

    def _fetch(self, parts: Iterator[Part]) -> Part | None:
        began = time.perf_counter()
        part = next(parts, None)
        self.machine.timed_data(began)
        return part

    def _placed(self, data: Any) -> Any:
        return data if self.device.type == "cpu" else tree.to_device(data, self.device)

    def _end(self, epoch: int, whole: bool) -> None:
        self.machine.end_loop(self)
        self.part = None
        if self.uncommitted and self.machine.activity() == self.seen_activity:
            self.uncommitted = []  # looked at, not trained on: an evaluation
        entry = self.ledger.epochs.get(epoch)
        if whole and entry is not None and entry.committed:
            self.machine.emit(
                EpochDone(
                    rank=self.cut.rank,
                    epoch=epoch,
                    committed=entry.committed,
                    expected=entry.planned,
                    loader=self.index,
                )
            )

    def evaluate(self) -> Iterator[Any]:
        """Every sample once, outside of training: no marks, no shares; an empty part is skipped."""
        epoch, self.epochs = self.epochs, self.epochs + 1
        for part in self.parts.epoch(epoch, []):
            if part.count:
                yield self._placed(part.data)

    def mark(self) -> None:
        for part in self.uncommitted:
            self.ledger.commit(part, self.cut.rank, self.cut.size)
        self.uncommitted = []

    def rewind(self) -> int:
        again, self.uncommitted = self.uncommitted, []
        if self.iterating:
            self.parts.rewind(again)
        else:
            self.owed += again
        return len(again)


class PreparedLoader(DataLoader[Any]):
    """Mixed into the loader's own class, so subclasses keep their attributes and methods."""

    _feed: Feed

    def __iter__(self) -> Any:
        return self._feed.iterate()

    def __len__(self) -> int:
        batches = super().__len__()
        cut = self._feed.cut
        return -(-batches // cut.size) if cut.per_worker else batches


def prepare_loader(loader: DataLoader[Any], feed: Feed) -> DataLoader[Any]:
    """A copy of the loader that iterates through `feed`."""
    prepared = copy.copy(loader)
    cls = type(loader)
    prepared.__class__ = type(
        cls.__name__, (PreparedLoader, cls) if cls is not DataLoader else (PreparedLoader,), {}
    )
    prepared.__dict__["_feed"] = feed
    return prepared


def feed_of(loader: Any) -> Feed | None:
    return getattr(loader, "_feed", None)
