"""Dealing: which samples of a global batch a rank takes. Pure; every rank computes the same.

A global batch is cut into `microbatches` slices, each slice into one contiguous part a rank, so the parts of a slice
in rank order are the slice, and a slice holds the same samples at any world size. `accumulate` batches make a group: one
optimizer step. What travels through the loader is a list of Micro, whoever the rank is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from typing import Any, Generic, Protocol, TypeVar

G = TypeVar("G")


def part(n: int, rank: int, size: int) -> tuple[int, int]:
    """The positions [lo, hi) of n samples that `rank` of `size` takes: contiguous, sizes differ by at most one."""
    each, over = divmod(n, size)
    lo = rank * each + min(rank, over)
    return lo, lo + each + (rank < over)


@dataclass(frozen=True)
class Micro:
    """One forward and backward: a slice of a global batch, before it is dealt."""

    epoch: int
    batch: int
    """Number of the global batch in its epoch."""
    slice: int
    ids: Sequence[Any]
    """The samples of the slice in global order."""
    total: int
    """Samples of the whole group (one optimizer step): gradients are weighted by count / total."""
    last: bool
    """The group ends here: gradients meet and the optimizer steps."""
    bounds: tuple[int, ...] | None = None
    """With batch=per-worker: where each worker's own batch ends in `ids`."""
    batches: int = 1
    """Batches of the script's loader that make this global batch: several with batch=per-worker."""

    def dealt(self, rank: int, size: int) -> tuple[int, int]:
        """The positions in `ids` that `rank` takes; empty when there is nothing left for it."""
        if self.bounds is None:
            return part(len(self.ids), rank, size)
        ends = (0, *self.bounds)
        if rank + 1 >= len(ends):
            return len(self.ids), len(self.ids)
        return ends[rank], ends[rank + 1]


@dataclass(frozen=True)
class Cut:
    """How batches become micro-steps: fields of the strategy, and the world."""

    rank: int = 0
    size: int = 1
    accumulate: int = 1
    microbatches: int = 1
    per_worker: bool = False
    first: int = 0
    every: int = 1
    """Only every n-th of the loader's batches, from this one on, is this worker's: where each takes whole ones by itself."""
    together: int = 1
    """A micro-step is a whole batch, and whoever gets it cuts it into so many slices (a pipeline): a worker's samples are its parts of
    the slices, one behind the other."""
    pieces: int = 0
    """Workers take pieces of the epoch as they ask for them: each group of batches is cut into so many. 0: batches are cut over
    the workers."""

    def slices(self, micro: Micro) -> list[int]:
        """With `together`: how many samples of each slice are this rank's; 0 where it has none, so that every rank has as many slices."""
        if self.per_worker:
            lengths = [b - a for a, b in pairwise((0, *(micro.bounds or (len(micro.ids),))))]
            mine = lengths[self.rank] if self.rank < len(lengths) else 0
            return [_length(mine, i, self.together) for i in range(min(self.together, max(lengths)))]
        whole = len(micro.ids)
        sizes = [_length(whole, i, self.together) for i in range(min(self.together, whole))]
        return [_length(size, self.rank, self.size) for size in sizes]


def _length(n: int, rank: int, size: int) -> int:
    lo, hi = part(n, rank, size)
    return hi - lo


@dataclass(frozen=True)
class Position:
    """A place in an epoch, in terms that do not depend on the number of workers."""

    start: int = 0
    """Batches of the script's loader that were dealt in whole groups."""
    into: int = 0
    """Micro-steps of the next group that were dealt too."""

    def after(self, micro: Micro, group: int) -> Position:
        """The place behind `micro`; `group` are the loader's batches of its group so far, its own included."""
        return Position(self.start + group) if micro.last else Position(self.start, self.into + 1)


BEGINNING = Position()


def micros(
    batches: Iterable[Sequence[Any]], epoch: int, cut: Cut, position: Position = BEGINNING
) -> Iterator[Micro]:
    """The micro-steps of an epoch from `position` on, in order. The last group may be incomplete and still ends with
    last=True."""
    rest = islice(islice(iter(batches), cut.first, None, cut.every), position.start, None)
    yield from islice(_micros(rest, epoch, cut, position.start), position.into, None)


def _micros(batches: Iterable[Sequence[Any]], epoch: int, cut: Cut, start: int) -> Iterator[Micro]:
    if (
        cut.accumulate == cut.microbatches == 1 and not cut.per_worker
    ):  # most runs; the rest below says the same
        for number, batch in enumerate(batches, start):
            yield _whole(Micro(epoch, number, 0, batch, len(batch), True), cut)
        return
    step_batches = cut.size if cut.per_worker else 1
    stream = iter(batches)
    number = -(-start // step_batches)
    while True:
        group = [list(islice(stream, step_batches)) for _ in range(cut.accumulate)]
        group = [batch for batch in group if batch]
        if not group:
            return
        total = sum(len(piece) for batch in group for piece in batch)
        slices = [
            (number + i, j, len(batch), pieces)
            for i, batch in enumerate(group)
            for j, pieces in enumerate(_slices(batch, cut))
        ]
        for at, (batch_number, slice_number, num_batches, pieces) in enumerate(slices):
            micro = Micro(
                epoch=epoch,
                batch=batch_number,
                slice=slice_number,
                ids=list(chain.from_iterable(pieces)),
                total=total,
                last=at == len(slices) - 1,
                bounds=_ends(pieces) if cut.per_worker else None,
                batches=num_batches,
            )
            yield _whole(micro, cut)
        number += len(group)


def _whole(micro: Micro, cut: Cut) -> Micro:
    """With `together`: the samples worker by worker, each with its parts of the slices in their order."""
    if cut.together == 1 or cut.per_worker:
        return micro
    ids = micro.ids
    slices = [ids[slice(*part(len(ids), i, cut.together))] for i in range(cut.together)]
    mine = [
        [i for ids in slices for i in ids[slice(*part(len(ids), rank, cut.size))]] for rank in range(cut.size)
    ]
    return replace(micro, ids=list(chain.from_iterable(mine)), bounds=_ends(mine))


def pieces(batches: Iterable[Sequence[Any]], epoch: int, cut: Cut) -> Iterator[list[Micro]]:
    """The epoch as pieces that workers take whole, in the order of their numbers: the micro-steps of each. A group of `accumulate`
    batches gives up to cut.pieces of them, none of them empty; a piece has a part of each of its batches."""
    stream, number = iter(batches), 0
    while group := list(islice(stream, cut.accumulate)):
        for j in range(cut.pieces):
            mine = [batch[slice(*part(len(batch), j, cut.pieces))] for batch in group]
            total = sum(map(len, mine))
            if not total:
                continue
            whole = [ids for batch in mine if batch for (ids,) in _slices([batch], cut)]
            yield [
                Micro(epoch, number, at, ids, total, last=at == len(whole) - 1)
                for at, ids in enumerate(whole)
            ]
            number += 1


def num_pieces(batches: int, size: int, last: int, cut: Cut) -> int:
    """How many pieces() gives, of so many batches of `size` samples, the last one of `last`."""
    groups, rest = divmod(batches, cut.accumulate)
    whole = min(cut.pieces, size)
    if rest == 0:
        groups, rest = groups - 1, cut.accumulate
    return groups * whole + (whole if rest > 1 else min(cut.pieces, last))


@dataclass(frozen=True)
class Done:
    """Which pieces of an epoch are done, and how it was cut into them: plain data for checkpoints."""

    accumulate: int = 1
    pieces: int = 1
    low: int = 0
    """All before this one."""
    above: tuple[int, ...] = ()
    """And these."""

    def rest(self, batches: Iterable[Sequence[Any]]) -> Iterator[list[Any]]:
        """What is left, as batches of its own: for whoever cuts in another way."""
        cut, above = Cut(accumulate=self.accumulate, pieces=self.pieces), set(self.above)
        for number, micros_ in enumerate(pieces(batches, 0, cut)):
            if number >= self.low and number not in above:
                yield [i for micro in micros_ for i in micro.ids]


class Deal(Protocol):
    """How a worker gets its pieces of a loader's epochs, where workers take them as they ask."""

    number: int
    """Of the loader, the same on every worker."""

    def begin(self, epoch: int, total: int | None, done: Done) -> Takes:
        """An epoch begins here."""
        ...

    def states(self) -> dict[int, tuple[int, list[int]]]:
        """(low, above) of each epoch that somebody began and that is not over."""
        ...

    def shared(self) -> Cut:
        """How batches are cut over the workers that are there: in evaluations."""
        ...


class Takes(Protocol):
    """Where the numbers of this worker's pieces of one epoch come from."""

    low: int
    """All pieces before this one are done: nobody will get one of them."""
    over: bool
    before_wait: Callable[[], None]
    after_wait: Callable[[], None]
    """Called before this worker waits for a piece, and when it got one."""

    def take(self, wait: bool) -> int | None:
        """The next piece; None for none now (without `wait`), or none any more (`over`)."""
        ...

    def ended(self, total: int) -> None:
        """There are only so many."""
        ...

    def done(self, pieces: Sequence[int]) -> None: ...
    def drop(self, pieces: Sequence[int]) -> None: ...
    def leave(self) -> None: ...
    def state(self) -> tuple[int, list[int]]: ...


class Picker(Generic[G]):
    """The groups of an epoch that are this worker's, by the numbers that it takes. Groups that it passed by are kept until nobody can
    give them back."""

    def __init__(self, groups: Iterator[G], takes: Takes) -> None:
        self.groups, self.takes = groups, takes
        self.passed: dict[int, G] = {}
        self.at = 0
        self.first = next(self.groups, None)
        """Of the epoch; it may be anybody's. A sampler draws its order when it is asked for it, on every worker alike."""
        if self.first is not None:
            self.passed[0], self.at = self.first, 1

    def pick(self, wait: bool) -> G | None:
        """The next one; None for none now, or none any more (takes.over)."""
        while (number := self.takes.take(wait)) is not None:
            while self.at <= number and (group := next(self.groups, None)) is not None:
                if self.at >= self.takes.low:
                    self.passed[self.at] = group
                self.at += 1
            if number in self.passed:
                for old in [n for n in self.passed if n < self.takes.low]:
                    del self.passed[old]
                return self.passed[number]
            if number < self.at:  # all were told that it is done
                self.takes.done([number])
                continue
            self.takes.ended(self.at)
        if self.takes.over:
            for (
                _
            ) in self.groups:  # generators must be in the same place everywhere when the next epoch begins
                pass
        return None


def _slices(batch: list[Sequence[Any]], cut: Cut) -> list[list[Sequence[Any]]]:
    """A global batch (one piece, or one a worker) as up to `microbatches` slices, none of them empty."""
    slices = [[p[slice(*part(len(p), i, cut.microbatches))] for p in batch] for i in range(cut.microbatches)]
    return [s for s in slices if any(len(p) for p in s)]


def _ends(pieces: Sequence[Sequence[Any]]) -> tuple[int, ...]:
    ends, at = [], 0
    for piece in pieces:
        at += len(piece)
        ends.append(at)
    return tuple(ends)
