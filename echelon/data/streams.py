"""Parts of a stream: an IterableDataset, or a loader whose items are ready-made batches (batch_size=None).

Every rank reads the one stream and keeps its part of each batch: the cut is made where the batch is collated, in the
loader's own processes. A dataset with a method `shard(index, count)` declares shards: then each rank reads its own only.
Parts since the last commit are kept as copies, so a lost step needs no second read of the stream.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_convert

from echelon.clock import Deadline
from echelon.comm.group import Group, Lost
from echelon.data import tree
from echelon.data.deal import Cut, Done, Micro, Picker, Position, Takes, part
from echelon.data.loader import START, Part, Place, Take, WorkerInit
from echelon.data.randomness import Stream, mix
from echelon.errors import PeerLost, UsageError

Pieces = list[tuple[int, int, Any]]
"""(samples of the slice, samples of mine, my data) for each slice of a batch."""

SHARD_LIMIT_S = 1800.0


@dataclass(frozen=True)
class Round:
    """What the world reads at a time: this rank's pieces, and how many batches of the script's loader it is made of."""

    slices: Pieces
    batches: int = 1


@dataclass
class CutBatch:
    """A batch after collation: this rank's piece of every slice. Knows how to be pinned."""

    pieces: Pieces

    def pin_memory(self) -> CutBatch:
        return CutBatch(
            [(n, mine, tree.map_tree(lambda t: t.pin_memory(), data)) for n, mine, data in self.pieces]
        )


class CutCollate:
    """Collates only what this rank keeps of a batch of samples; a stand-in where it keeps nothing."""

    def __init__(self, collate: Callable[[Any], Any], cut: Cut, ready_made: bool) -> None:
        self.collate, self.cut, self.ready_made = collate, cut, ready_made

    def __call__(self, batch: Any) -> CutBatch:
        if self.ready_made:
            batch = self.collate(batch)
            n = tree.length(batch)
            if n is None:
                raise UsageError(
                    "batch_size=None: the tensors of an item share no first dimension, so it cannot be cut over the workers",
                    remedy="Let the dataset yield samples (batch_size=B), or let each worker take whole items: --set batch=per-worker.",
                )
            take = lambda lo, hi: tree.cut_tree(batch, lo, hi, n)  # noqa: E731
        else:
            n = len(batch)
            take = lambda lo, hi: self.collate(batch[lo:hi])  # noqa: E731
        return CutBatch(list(self._pieces(n, take)))

    def _pieces(self, n: int, take: Callable[[int, int], Any]) -> Iterator[tuple[int, int, Any]]:
        for i in range(self.cut.microbatches):
            start, stop = part(n, i, self.cut.microbatches)
            if start == stop:
                continue
            lo, hi = (
                (0, stop - start) if self.cut.per_worker else part(stop - start, self.cut.rank, self.cut.size)
            )
            mine = hi - lo
            yield stop - start, mine, take(start + lo, start + hi) if mine else take(start, start + 1)


class StreamParts:
    """The parts of a stream loader. See MapParts for the verbs."""

    copies = True

    def __init__(
        self, loader: DataLoader[Any], cut: Cut, seed: int, group: Group, take: Take | None = None
    ) -> None:
        self.user, self.seed, self.group, self.take = loader, seed, group, take
        self.cut = cut = _by_slices(cut) if cut.pieces > 1 else cut
        self.takes: Takes | None = None
        self.states: dict[int, Any] = {}
        """Behind how many batches -> (the dataset's own state there, the stream's randomness); the last two groups'."""
        self.num_skipped = 0
        self.again: deque[Part] = deque()
        dataset: Any = loader.dataset
        self.sharded = take is None and isinstance(dataset, IterableDataset) and _declares_shards(dataset)
        batch_size, rank_cut = loader.batch_size, cut
        if self.sharded:
            dataset = dataset.shard(index=cut.rank, count=cut.size)
            lo, hi = (0, batch_size or 1) if cut.per_worker else part(batch_size or 1, cut.rank, cut.size)
            batch_size = None if batch_size is None else max(1, hi - lo)
            rank_cut = replace(cut, rank=0, size=1)
        self.dataset = dataset
        self.generator = torch.Generator()
        ready_made = loader.batch_size is None
        options: dict[str, Any] = {} if isinstance(dataset, IterableDataset) else {"sampler": loader.sampler}
        if ready_made:
            options["batch_size"] = None
        else:
            options |= {"batch_size": batch_size, "drop_last": loader.drop_last}
        self.inner: DataLoader[Any] = DataLoader(
            dataset,
            **options,
            num_workers=loader.num_workers,
            collate_fn=CutCollate(loader.collate_fn or default_convert, rank_cut, ready_made),
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=WorkerInit(loader.worker_init_fn),
            multiprocessing_context=loader.multiprocessing_context,
            generator=self.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    @property
    def rereads(self) -> bool:
        """True when coming back to a place means to read all of the stream before it once more."""
        return self.take is not None or not (
            self.user.num_workers == 0
            and callable(getattr(self.dataset, "state_dict", None))
            and callable(getattr(self.dataset, "load_state_dict", None))
        )

    def source(self, position: Position) -> Any:
        """What a Place needs to come back to `position`; without a state the stream is read again up to there."""
        if self.takes is not None:
            low, above = self.takes.state()
            done = Done(self.cut.accumulate, self.cut.pieces, low, tuple(above))
            return {"workers": self.cut.size, "sharded": False, "state": None, "done": [list(astuple(done))]}
        return {"workers": self.cut.size, "sharded": self.sharded, "state": self.states.get(position.start)}

    def epoch(self, epoch: int, again: Sequence[Part] = (), place: Place = START) -> Iterator[Part]:
        """This rank's parts of one epoch from `place` on, after those of `again`."""
        self.again.extend(again)
        self.states, behind = {}, place.position.start
        stream = Stream(mix(self.seed, epoch, "stream"))
        if self.take is not None:
            yield from self._dealt(epoch, stream, place, self.take)
            return
        if (place.source or {}).get("done"):
            raise UsageError(
                "this epoch of a stream was left by workers that took whole batches of it, and cannot go on with batches cut over workers",
                remedy="Resume with the strategy that it was left with, or at the end of an epoch.",
            )
        state = self._state(place.source or {})
        if state is not None:
            self.dataset.load_state_dict(state[0])
            stream = Stream.at(state[1])
        source = self._sharded(epoch, stream) if self.sharded else self._whole(epoch, stream)
        if state is None:
            self._skip(source, behind)
        yield from islice(self._parts(epoch, source, stream, behind), place.position.into, None)

    def _state(self, source: dict[str, Any]) -> Any:
        """The dataset's saved state, if it is of use here."""
        if (source.get("sharded") or self.sharded) and source.get("workers", self.cut.size) != self.cut.size:
            raise UsageError(
                f"a stream in shards was left by {source['workers']} workers, each in its own shard, and cannot go on with {self.cut.size}",
                remedy=f"Resume with --workers {source['workers']}, or at the end of an epoch.",
            )
        return None if self.rereads else source.get("state")

    def _skip(self, source: Iterator[Round], num_batches: int) -> None:
        left = num_batches
        while left > 0:
            pieces = next(source, None)
            if pieces is None:
                raise UsageError(
                    f"the stream ended {left} batches before the place at which this run goes on",
                    remedy="Is it the same data? A stream that begins elsewhere each time needs state_dict and load_state_dict.",
                )
            left -= pieces.batches
        self.num_skipped = num_batches

    def _dealt(self, epoch: int, stream: Stream, place: Place, take: Take) -> Iterator[Part]:
        """The whole stream is read here; what other workers take is passed by, and kept until it cannot come back."""
        mine = Done(self.cut.accumulate, self.cut.pieces)
        if place.source:
            saved = place.source.get("done") or [[1, 1, place.position.start, []]]
            mine = Done(*saved[-1])
            if (mine.accumulate, mine.pieces) != (self.cut.accumulate, self.cut.pieces):
                raise UsageError(
                    f"an epoch of a stream was left in pieces of {mine.accumulate} batches / {mine.pieces}, and cannot go on in others",
                    remedy="Resume with the same accumulate, workers and backup, or at the end of an epoch.",
                )
        self.takes = take(epoch, None, mine)
        picker = Picker(self._pieces(epoch, self._whole(epoch, stream), stream), self.takes)
        ghost = picker.first if place.ghost else None
        if ghost:
            yield self._copy(replace(ghost[-1], micro=replace(ghost[-1].micro, batch=-1)))
        while True:
            while self.again:
                yield self._copy(self.again.popleft())
            group = picker.pick(wait=True)
            if group is None:
                self.takes = None
                return
            for one in group:
                yield self._copy(one)
                while self.again:
                    yield self._copy(self.again.popleft())

    def _pieces(self, epoch: int, source: Iterator[Round], stream: Stream) -> Iterator[list[Part]]:
        group: list[Part] = []
        number = 0
        for found in self._parts(epoch, source, stream, 0):
            micro, alone = found.micro, self.cut.pieces > 1
            last = micro.last or alone
            total = found.count if alone else micro.total
            at = replace(micro, batch=number, slice=len(group), last=last, total=total)
            group.append(replace(found, micro=at))
            if last:
                yield group
                group, number = [], number + 1

    def _parts(self, epoch: int, source: Iterator[Round], stream: Stream, behind: int) -> Iterator[Part]:
        each = self.cut.size if self.cut.per_worker and not self.sharded else 1
        number = -(-behind // each)
        while True:
            while self.again:
                yield self._copy(self.again.popleft())
            group = [
                pieces
                for pieces in (next(source, None) for _ in range(self.cut.accumulate))
                if pieces is not None
            ]
            if not group:
                return
            total = sum(n for pieces in group for n, _, _ in pieces.slices)
            flat = [
                (number + i, j, pieces.batches, piece)
                for i, pieces in enumerate(group)
                for j, piece in enumerate(pieces.slices)
            ]
            number += len(group)
            behind += sum(pieces.batches for pieces in group)
            if not self.rereads:
                self.states[behind] = (copy.deepcopy(self.dataset.state_dict()), stream.state())
                for old in sorted(self.states)[:-2]:
                    del self.states[old]
            for at, (batch, slice_number, num_batches, (n, mine, data)) in enumerate(flat):
                last = at == len(flat) - 1
                micro = Micro(epoch, batch, slice_number, range(n), total, last, batches=num_batches)
                yield Part(micro, mine, data)
                while self.again:
                    yield self._copy(self.again.popleft())

    def _read(self, epoch: int, stream: Stream) -> Iterator[Pieces]:
        """The stream's batches in order, its randomness following from (seed, epoch) whoever reads."""
        self.generator.manual_seed(mix(self.seed, epoch, "stream processes"))
        with stream.entered():
            inner = iter(self.inner)
        while True:
            with stream.entered():
                batch = next(inner, None)
            if batch is None:
                return
            yield batch.pieces

    def _whole(self, epoch: int, stream: Stream) -> Iterator[Round]:
        source = self._read(epoch, stream)
        if not self.cut.per_worker:
            yield from map(Round, source)
            return
        while True:
            round_ = [
                pieces for pieces in (next(source, None) for _ in range(self.cut.size)) if pieces is not None
            ]
            if not round_:
                return
            yield Round(list(self._own(round_)), len(round_))

    def _own(self, round_: list[Pieces]) -> Iterator[tuple[int, int, Any]]:
        """batch=per-worker: of one batch a worker, my own; a stand-in when the stream ended before me."""
        for i in range(max(len(pieces) for pieces in round_)):
            n = sum(pieces[i][0] for pieces in round_ if i < len(pieces))
            mine = round_[self.cut.rank] if self.cut.rank < len(round_) else []
            if i < len(mine):
                yield n, mine[i][1], mine[i][2]
            else:
                yield n, 0, round_[0][0][2]

    def _sharded(self, epoch: int, stream: Stream) -> Iterator[Round]:
        """Own shard; ranks tell each other their counts, so all end together and none waits for a longer shard."""
        source = self._read(epoch, stream)
        spare: Any = None
        slices = self.cut.microbatches
        while True:
            pieces = next(source, None) or []
            counts = torch.zeros(slices, dtype=torch.int64)
            for i, (n, _, _) in enumerate(pieces):
                counts[i] = n
            outcome = self.group.all_reduce(counts).wait(Deadline.after(SHARD_LIMIT_S))
            if isinstance(outcome, Lost):
                raise PeerLost(f"a peer was lost between two batches of a sharded stream: {outcome.reason}")
            if not int(counts.sum()):
                return
            if pieces:
                spare = pieces[0][2]
            elif spare is None:
                raise UsageError(
                    f"shard {self.cut.rank} of {self.cut.size} of the stream is empty, and there is no sample to stand in",
                    remedy="Give every shard at least one sample, or use fewer workers.",
                )
            mine = dict(enumerate(pieces))
            yield Round(
                [
                    (int(n), *(mine[i][1:] if i in mine else (0, spare)))
                    for i, n in enumerate(counts.tolist())
                    if n
                ]
            )

    def rewind(self, again: Sequence[Part]) -> None:
        self.again.extendleft(reversed(again))

    @staticmethod
    def _copy(kept: Part) -> Part:
        return Part(kept.micro, kept.count, tree.map_tree(torch.clone, kept.data))

    @classmethod
    def kept(cls, part: Part) -> Part:
        """A copy of the part: the script may change its batch in place."""
        return cls._copy(part)


def _by_slices(cut: Cut) -> Cut:
    """Each slice of a batch is a piece by itself."""
    if cut.accumulate > 1 or cut.microbatches > 1:
        raise UsageError(
            "backup with accumulate or microbatches needs a dataset that is no stream",
            remedy="Leave accumulate and microbatches at 1, or use update=async.",
        )
    return replace(cut, microbatches=cut.pieces)


def _declares_shards(dataset: Any) -> bool:
    """A method `shard(index, count)`, by these names: others mean something else by that word."""
    method = getattr(dataset, "shard", None)
    return callable(method) and {"index", "count"} <= set(inspect.signature(method).parameters)
