"""Dealing: which samples of a global batch a rank takes. Pure; every rank computes the same.

A global batch is cut into `microbatches` slices, each slice into one contiguous part a rank, so the parts of a slice
in rank order are the slice, and a slice holds the same samples at any world size. `accumulate` batches make a group: one
optimizer step. What travels through the loader is a list of Micro, whoever the rank is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any


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
            yield Micro(epoch, number, 0, batch, len(batch), True)
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
            yield Micro(
                epoch=epoch,
                batch=batch_number,
                slice=slice_number,
                ids=list(chain.from_iterable(pieces)),
                total=total,
                last=at == len(slices) - 1,
                bounds=_ends(pieces) if cut.per_worker else None,
                batches=num_batches,
            )
        number += len(group)


def _slices(batch: list[Sequence[Any]], cut: Cut) -> list[list[Sequence[Any]]]:
    """A global batch (one piece, or one a worker) as up to `microbatches` slices, none of them empty."""
    slices = [[p[slice(*part(len(p), i, cut.microbatches))] for p in batch] for i in range(cut.microbatches)]
    return [s for s in slices if any(len(p) for p in s)]


def _ends(pieces: list[Sequence[Any]]) -> tuple[int, ...]:
    ends, at = [], 0
    for piece in pieces:
        at += len(piece)
        ends.append(at)
    return tuple(ends)
