"""The loader that a script holds: still a DataLoader of the script's length, dataset and batch size.

Iterating it yields this rank's part of every global batch, tells the machine which one, and starts again where the
last commit was when a step is lost. Every iterator is a Loop of its own; a Feed is all that one loader ever yields.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from echelon import activity
from echelon.comm.group import Group
from echelon.data import tree
from echelon.data.deal import Cut
from echelon.data.ledger import Ledger
from echelon.data.loader import MapParts, Part
from echelon.data.streams import StreamParts
from echelon.errors import UsageError
from echelon.events import EpochDone, Warned
from echelon.step import Machine


class Parts(Protocol):
    """Where parts come from: a map-style dataset or a stream."""

    copies: bool
    """Whether kept() copies data, so that keeping what nobody will ask for costs memory."""

    def epoch(self, epoch: int, again: list[Part]) -> Iterator[Part]: ...
    def rewind(self, again: list[Part]) -> None: ...
    def kept(self, part: Part) -> Part: ...


class Loop:
    """One iterator over a prepared loader."""

    def __init__(self, feed: Feed, parts: Parts, epoch: int, owed: list[Part]) -> None:
        self.feed, self.parts, self.epoch, self.owed = feed, parts, epoch, owed
        self.part: Part | None = None
        self.uncommitted: list[Part] = []
        """Yielded since the last commit; the loop's end changes nothing about that."""
        self.rank_samples = 0
        self.open = True
        self._activity = self._activity_before = 0
        """The machine's activity at the last yield, and before the first part that is uncommitted."""

    def run(self) -> Iterator[Any]:
        machine, whole = self.feed.machine, False
        parts = self.parts.epoch(self.epoch, self.owed)
        try:
            while (part := self._fetch(parts)) is not None:
                data = self.feed.placed(part.data)
                self.part = part
                machine.begin(self, part)
                self._keep(part, machine.activity())
                self.feed.ledger.plan(part)
                self.rank_samples += part.count
                yield data
            whole = True
        finally:
            self.open = False
            self._end(whole)

    def _fetch(self, parts: Iterator[Part]) -> Part | None:
        began = time.perf_counter()
        with activity.inside(activity.DATA):
            part = next(parts, None)
        activity.moved()
        self.feed.machine.timed_data(began)
        return part

    def _keep(self, part: Part, activity: int) -> None:
        """What a replay would need. A stream's part that nobody trained on is a copy for nothing."""
        if self.parts.copies and activity == self._activity and self.uncommitted:
            self.uncommitted.pop()
        if not self.uncommitted:
            self._activity_before = activity
        self._activity = activity
        if self.feed.machine.optimizers:
            self.uncommitted.append(self.parts.kept(part))

    def _end(self, whole: bool) -> None:
        machine = self.feed.machine
        trained = machine.activity() != self._activity_before
        if trained and not whole and machine.drop_group():
            self.uncommitted = []
            text = "the loop was left in the middle of an accumulation group: what the group held is dropped"
            machine.emit(Warned(rank=machine.rank, message=text))
        machine.end_loop(self)
        self.part = None
        if not trained:
            self.uncommitted = []  # looked at, not trained on: an evaluation
        self.feed.over(self, whole)


class Feed:
    """One prepared loader: its epochs, its loops, its ledger."""

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
        if type(loader).__iter__ is not DataLoader.__iter__:
            raise UsageError(
                f"{type(loader).__name__} has an __iter__ of its own, which prepare() would bypass",
                remedy="Put that logic into the dataset, the sampler or collate_fn, or prepare a plain DataLoader.",
            )
        self.user, self.cut, self.seed, self.group, self.device, self.machine = (
            loader,
            cut,
            seed,
            group,
            device,
            machine,
        )
        self.index = len(machine.loaders)
        if trains:
            machine.loaders.append(self)
        self.ledger = Ledger()
        self.epochs = 0
        self.loops: list[Loop] = []
        self.owed: list[Part] = []
        """Lost after their loop had ended: the next loop begins with these."""
        self._parts = self._make()

    def _make(self) -> Parts:
        streams = isinstance(self.user.dataset, IterableDataset) or self.user.batch_sampler is None
        if streams:
            return StreamParts(self.user, self.cut, self.seed, self.group)
        return MapParts(self.user, self.cut, self.seed)

    def _free_parts(self) -> Parts:
        """The loader's own source of parts, or another one while a loop still holds it."""
        return (
            self._make()
            if any(loop.open and loop.parts is self._parts for loop in self.loops)
            else self._parts
        )

    def iterate(self) -> Iterator[Any]:
        """One epoch, as a script's `for` sees it."""
        epoch, self.epochs = self.epochs, self.epochs + 1
        owed, self.owed = self.owed, []
        loop = Loop(self, self._free_parts(), epoch, owed)
        self.loops = [old for old in self.loops if old.open or old.uncommitted] + [loop]
        return loop.run()

    def over(self, loop: Loop, whole: bool) -> None:
        entry = self.ledger.epochs.get(loop.epoch)
        if whole and entry is not None and entry.committed:
            held = sum(len(p.micro.ids) for p in loop.uncommitted)  # the script will step on these later
            self.machine.emit(
                EpochDone(
                    rank=self.cut.rank,
                    epoch=loop.epoch,
                    committed=entry.committed,
                    expected=entry.planned - held,
                    loader=self.index,
                )
            )

    def evaluate(self) -> Iterator[Any]:
        """Every sample once, outside of training: no marks, no shares; an empty part is skipped."""
        epoch, self.epochs = self.epochs, self.epochs + 1
        for part in self._free_parts().epoch(epoch, []):
            activity.moved()
            if part.count:
                yield self.placed(part.data)

    def placed(self, data: Any) -> Any:
        return data if self.device.type == "cpu" else tree.to_device(data, self.device)

    def mark(self) -> None:
        for loop in self.loops:
            for part in loop.uncommitted:
                self.ledger.commit(part, self.cut.rank, self.cut.size)
            loop.uncommitted = []

    def rewind(self) -> int:
        total = 0
        for loop in self.loops:
            again, loop.uncommitted = loop.uncommitted, []
            total += len(again)
            if loop.open:
                loop.parts.rewind(again)
            elif again:
                self.owed += again
        return total


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
