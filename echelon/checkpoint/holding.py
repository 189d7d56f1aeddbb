"""What a rank holds, and who writes what of it: dealt so that every byte is written once and all write alike much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.checkpoint import kinds
from echelon.errors import CheckpointError
from echelon.mesh.layout import Key, Placed, Runs, Span
from echelon.mesh.runs import cut

CUT_BYTES = 1 << 20
"""Tensors below this are never cut: a piece more costs more than the balance gains."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A tensor of this rank's state: `span` of the global tensor under `key` (or what of it is `Placed` here), held alike by the ranks in
    `copies`."""

    key: Key
    tensor: Tensor
    """On any device, contiguous or not: exactly the elements of the span, in flattened order."""
    span: Span | Placed
    copies: tuple[int, ...]
    """All ranks that hold the very same span, this one included: the writing of it is dealt over them."""
    settled: bool = True
    """Does not change before the next before_change(), so it may be copied in the background; False: copied at once."""

    def check(self, rank: int) -> None:
        """Raises CheckpointError unless the fields fit together."""
        what = f"{self.key.name} ({self.key.slot})"
        kinds.file_name(self.tensor.dtype, what)
        if self.tensor.layout is not torch.strided or self.tensor.is_meta:
            raise CheckpointError(
                f"{what} is a {self.tensor.layout} tensor on {self.tensor.device}: it has no plain bytes to save",
                remedy="Save it densely: tensor.to_dense().",
            )
        check_inside(what, self.tensor.numel(), self.span, "are held as")
        if rank not in self.copies:
            raise CheckpointError(f"{what} is held by rank {rank}, but its copies are {self.copies}")


@dataclass(frozen=True)
class Part:
    """Elements [start, stop) of a holding's own tensor, to be written by this rank; `run` is their place in the global tensor."""

    holding: Holding
    start: int
    stop: int
    run: Runs

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.holding.tensor.dtype.itemsize

    @property
    def whole(self) -> bool:
        """Is this the whole global tensor?"""
        return self.run == Runs(0, math.prod(self.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the global tensor."""
        return self.holding.span.shape


def share(holdings: Sequence[Holding], rank: int) -> list[Part]:
    """What `rank` writes of what it holds. Ranks that hold the same thing decide alike without asking each other."""
    sets: dict[tuple[int, ...], list[Holding]] = {}
    for holding in holdings:
        sets.setdefault(tuple(sorted(set(holding.copies))), []).append(holding)
    parts = []
    for copies, held in sorted(sets.items()):
        held = sorted(
            held, key=lambda h: (h.key.name, h.key.slot, h.span.runs[0].start if h.span.runs else 0)
        )
        sizes = [(h.tensor.numel(), h.tensor.dtype.itemsize) for h in held]
        mine = deal(sizes, len(copies))[copies.index(rank)]
        for index, start, stop in mine:
            pieces = cut(held[index].span.runs, start, stop)
            parts += [Part(held[index], at, at + run.numel, run) for at, run in pieces]
    return parts


def check_inside(what: str, numel: int, span: Span | Placed, verb: str) -> None:
    """Raises CheckpointError unless `numel` elements are what `span` says, and all of it is in the tensor."""
    whole = math.prod(span.shape)
    fits = all(
        run.start >= 0 and run.length >= 0 and run.count >= 1 and (run.count == 1 or run.length <= run.period)
        and run.start + (run.count - 1) * run.period + run.length <= whole
        for run in span.runs
    )  # fmt: skip
    if not fits or span.numel != numel:
        raise CheckpointError(
            f"{what}: {numel} elements {verb} {_spelled(span)} of shape {tuple(span.shape)}"
        )


def _spelled(span: Span | Placed) -> str:
    if isinstance(span, Span):
        return f"[{span.start}, {span.stop})"
    return (
        ", ".join(f"{r.count} × {r.length} from {r.start}, every {r.period}" for r in span.runs) or "nothing"
    )


def deal(sizes: Sequence[tuple[int, int]], ways: int) -> list[list[tuple[int, int, int]]]:
    """Cuts the row of all tensors (elements, bytes an element) into `ways` stretches of about equal bytes.

    For each way (index of a tensor, start, stop). Tensors under CUT_BYTES stay whole with the stretch in which their middle lies.
    """
    total = sum(numel * width for numel, width in sizes)
    bounds = [total * way // ways for way in range(1, ways)] + [math.inf]
    dealt: list[list[tuple[int, int, int]]] = [[] for _ in range(ways)]
    way, at = 0, 0
    for index, (numel, width) in enumerate(sizes):
        end = at + numel * width
        if end - at < CUT_BYTES:
            while bounds[way] < (at + end) / 2:
                way += 1
            dealt[way].append((index, 0, numel))
        else:
            start = 0
            while start < numel:
                while bounds[way] <= at + start * width:
                    way += 1
                stop = numel if end <= bounds[way] else -(-int(bounds[way] - at) // width)
                dealt[way].append((index, start, stop))
                start = stop
        at = end
    return dealt
