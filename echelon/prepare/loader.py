"""The loader that a script holds: still a DataLoader of the script's length, dataset and batch size.

Iterating it yields this rank's part of every global batch, tells the machine which one, and starts again where the
last commit was when a step is lost. Every iterator is a Loop of its own; a Feed is all that one loader ever yields.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from echelon import activity
from echelon.comm.group import Group
from echelon.data import order, tree
from echelon.data.deal import BEGINNING, Cut, Deal, Micro, Position, Takes
from echelon.data.ledger import EpochLedger, Ledger
from echelon.data.loader import MapParts, Part, Place, Take
from echelon.data.streams import StreamParts
from echelon.errors import UsageError
from echelon.events import EpochDone, Warned
from echelon.prepare.taken import TakesPieces
from echelon.prepare.trail import Mark, Trail
from echelon.step import Machine


class Parts(Protocol):
    """Where parts come from: a map-style dataset or a stream."""

    copies: bool
    """Whether kept() copies data, so that keeping what nobody will ask for costs memory."""

    @property
    def rereads(self) -> bool:
        """Whether coming back to a place means reading everything before it once more."""
        ...

    takes: Takes | None
    """Where the open epoch's pieces come from, where workers take them as they ask."""

    def epoch(self, epoch: int, again: list[Part], place: Place = ...) -> Iterator[Part]: ...
    def source(self, position: Position) -> Any: ...
    def rewind(self, again: list[Part]) -> None: ...
    def kept(self, part: Part) -> Part: ...


class Loop:
    """One iterator over a prepared loader."""

    def __init__(
        self, feed: Feed, parts: Parts, epoch: int, owed: list[Part], mark: Mark, saved: Mark | None
    ) -> None:
        self.feed, self.parts, self.epoch, self.owed = feed, parts, epoch, owed
        self.mark, self.saved = mark, saved
        """Where this loop is in the script, and what a run that is resumed had there."""
        self.place = _place(saved)
        self.position = self.before = self.committed = self.place.position
        """Behind the last part, before it, and behind the last one that was committed."""
        self.takes: Takes | None = None
        self.group: list[Micro] = []
        self.num_owed = len(owed)
        self.part: Part | None = None
        self.uncommitted: list[Part] = []
        """Yielded since the last commit; the loop's end changes nothing about that."""
        self.rank_samples = 0
        self.open = True
        self.abandoned = False
        """The script left it before its end: it is ended by the garbage collector, where nothing can be raised."""
        self._activity = self._activity_before = 0
        """The machine's activity at the last yield, and before the first part that is uncommitted."""

    def run(self) -> Iterator[Any]:
        machine, trail, saved, whole = self.feed.machine, self.feed.trail, self.saved, False
        if saved is not None and saved.done and not self._runs_again(saved):
            self.open = False
            machine.loop_over(self)
            self.mark.value = saved.value
            trail.leave(self.mark)
            trail.arrived_at(saved)
            return
        if self.feed.deal is not None and saved is not None and not saved.done:
            trail.arrived_at(saved)  # all come back together, and there may be no piece for this worker
        parts = self.parts.epoch(self.epoch, self.owed, self.place)
        try:
            while (part := self._fetch(parts)) is not None:
                data = self.feed.placed(part.data)
                self.part, self.takes = part, self.parts.takes
                if saved is not None and saved.here and not saved.done:
                    trail.arrived_at(saved)
                machine.begin(self, part)
                self._keep(part, machine.activity())
                self.feed.ledger.plan(part)
                self.rank_samples += part.count
                trail.item(self.mark, saved if saved is not None and saved.inside else None)
                yield data
                trail.between(self.mark)
                if trail.following and saved is not None and saved.inside:
                    trail.give_in() if saved.value["committed"] else trail.lost_way()
            whole = True
        finally:
            self.open = False
            self._end(whole)
        trail.arrived_at(saved)

    def _runs_again(self, saved: Mark) -> bool:
        """On the way back: a script's own evaluation loop, after which nothing was trained, gives the same numbers again."""
        return not saved.value["trained"] and not self.feed.trail.trained_later(saved)

    def stand(self) -> None:
        """Writes into the mark where this loop is, for a checkpoint of now."""
        position = self.before if self.mark.inside else self.position
        if self.takes is not None:
            position = BEGINNING  # what is done is in the source
        self.mark.value = {
            "epoch": self.epoch,
            **asdict(position),
            "trained": True,
            "committed": not self.uncommitted,
            "source": self.parts.source(position),
        }

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
        self._count(part.micro)

    def _count(self, micro: Micro) -> None:
        if micro.epoch != self.epoch:
            self.num_owed -= 1
            return
        if self.takes is not None:
            return  # the ledger knows
        self.group.append(micro)
        batches = {m.batch: m.batches for m in self.group}
        self.before, self.position = self.position, self.position.after(micro, sum(batches.values()))
        if micro.last:
            self.group = []

    def _end(self, whole: bool) -> None:
        machine = self.feed.machine
        self.abandoned = not whole
        trained = machine.activity() != self._activity_before
        if trained and not whole and machine.drop_group():
            self.uncommitted = []
            text = "the loop was left in the middle of an accumulation group: what the group held is dropped"
            machine.emit(Warned(rank=machine.rank, message=text))
        self.mark.value = {"trained": trained, "epoch": self.epoch}
        self.feed.trail.leave(self.mark)
        if self.takes is not None and not whole:
            self.takes.leave()
        if not trained:
            self.uncommitted = []  # looked at, not trained on: an evaluation
        machine.end_loop(self)
        self.part = None
        self.feed.over(self, whole)
        machine.over(self)


class Feed(TakesPieces):
    """One prepared loader: its epochs, its loops, its ledger."""

    def __init__(
        self,
        loader: DataLoader[Any],
        cut: Cut,
        seed: int,
        group: Group,
        device: torch.device,
        machine: Machine,
        trail: Trail,
        trains: bool = True,
        deal: Deal | None = None,
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
        self.index, self.trail, self.deal = len(machine.loaders), trail, deal
        if trains:
            machine.loaders.append(self)
        self.ledger = Ledger()
        self.epochs = 0
        self.loops: list[Loop] = []
        self.owed: list[Part] = []
        """Lost after their loop had ended: the next loop begins with these."""
        self.passed = 0
        """Epochs of an earlier life that a script's own sampler was led through."""
        self._parts = self._make()
        self.dealt: dict[int, list[Any]] = {}
        """Epochs of which others had taken pieces when the run was left: how they were cut, and what was done."""

    def _make(self) -> Parts:
        return self._parts_of(self.cut, self._take if self.deal is not None else None)

    def _parts_of(self, cut: Cut, take: Take | None) -> Parts:
        streams = isinstance(self.user.dataset, IterableDataset) or self.user.batch_sampler is None
        if streams:
            return StreamParts(self.user, cut, self.seed, self.group, take)
        return MapParts(self.user, cut, self.seed, take)

    def _free_parts(self) -> Parts:
        """The loader's own source of parts, or another one while a loop still holds it."""
        return (
            self._make()
            if any(loop.open and loop.parts is self._parts for loop in self.loops)
            else self._parts
        )

    def iterate(self) -> Iterator[Any]:
        """One epoch, as a script's `for` sees it."""
        mark, saved = self.trail.enter(f"loop {self.index}")
        epoch, self.epochs = self.epochs, self.epochs + 1
        if saved is not None:
            epoch = saved.value["epoch"]
        if saved is not None and not saved.done:
            self.pass_over(epoch)
        owed, self.owed = self.owed, []
        loop = Loop(self, self._free_parts(), epoch, owed, mark, saved)
        if saved is None and epoch in self.dealt:
            loop.place = Place(source={"generators": (), "done": [self.dealt.pop(epoch)]})
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

    def evaluate(self, together: bool = False) -> Iterator[tuple[Any, bool]]:
        """Every sample once, outside of training: no marks, no shares; an empty part is skipped, or with `together` a stand-in that does
        not count."""
        epoch, self.epochs = self.epochs, self.epochs + 1
        parts = self._free_parts() if self.deal is None else self._parts_of(self.deal.shared(), None)
        for part in parts.epoch(epoch, []):
            activity.moved()
            if part.count or together:
                yield self.placed(part.data), part.count > 0

    def placed(self, data: Any) -> Any:
        return data if self.device.type == "cpu" else tree.to_device(data, self.device)

    def pass_over(self, epochs: int) -> None:
        """A script's own sampler goes through the epochs before this one, if it has not yet."""
        if not self._parts.copies:  # a stream has no order
            order.pass_over(self.user, self.seed, range(self.passed, epochs))
        self.passed = max(self.passed, epochs)

    @property
    def owing(self) -> bool:
        """Batches that were lost wait for another loop: no place in the data says that."""
        return bool(self.owed) or any(loop.open and loop.num_owed for loop in self.loops)

    def saved(self) -> dict[str, Any]:
        """Where this loader is, as plain data; where its open loops are is in the trail."""
        for loop in self.loops:
            if loop.open:
                loop.stand()
        opened = {loop.epoch for loop in self.loops if loop.open}
        ledger = {
            e: [entry.planned, entry.committed] for e, entry in self.ledger.epochs.items() if e in opened
        }
        states = [generator.get_state() for generator in order.generators(self.user)]
        record = {"epochs": self.epochs, "ledger": ledger, "generators": states}
        if self.deal is not None:
            record["dealt"] = self._dealt_so_far()
        return record

    def restore(self, record: dict[str, Any]) -> None:
        """Back to saved(): the loops that were open then are open again."""
        opened = [loop for loop in self.loops if loop.open]
        if not opened:
            self.pass_over(record["epochs"])
        if not opened or order.draws_at_once(self.user):
            for generator, state in zip(order.generators(self.user), record["generators"], strict=False):
                generator.set_state(state)
        self.epochs = record["epochs"]
        self.dealt = {int(e): done for e, done in record.get("dealt", {}).items()}
        self.ledger.epochs.update({e: EpochLedger(*counts) for e, counts in record["ledger"].items()})
        for loop in opened:
            if loop.saved is not None and loop.saved.value.get("committed"):
                loop.uncommitted = []

    def told(self) -> list[str]:
        """After restore(): where the data goes on, for people."""
        lines = []
        for loop in self.loops:
            entry = self.ledger.epochs.get(loop.epoch)
            if loop.open and entry is not None:
                lines.append(f"epoch {loop.epoch} goes on behind {entry.committed:,} samples")
            if loop.open and self._parts.rereads and loop.place.position.start:
                lines.append(
                    f"the stream of loader {self.index} has no state_dict: read again, {loop.place.position.start:,} batches skipped"
                )
        return lines

    def mark(self) -> None:
        for loop in self.loops:
            for part in loop.uncommitted:
                self.ledger.commit(part, self.cut.rank, self.cut.size)
            if loop.takes is not None:
                pieces = sorted({part.micro.batch for part in loop.uncommitted if part.micro.last})
                loop.takes.done(pieces, sum(part.count for part in loop.uncommitted))
            loop.uncommitted = []
            loop.committed = loop.position

    def rewind(self) -> int:
        total = 0
        for loop in self.loops:
            again, loop.uncommitted = loop.uncommitted, []
            for part in again:
                self.ledger.unplan(part)
            loop.position, loop.group = loop.committed, []
            total += len(again)
            if loop.open:
                loop.parts.rewind(again)
            elif again:
                self.owed += again
        return total


def _place(saved: Mark | None) -> Place:
    if saved is None or saved.done:
        return Place()
    value = saved.value
    ghost = saved.inside and bool(value["committed"])
    return Place(Position(value["start"], value["into"]), value["source"], ghost)


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
