"""Which piece of a parameter lies on a worker of the tensor axis: pure.

A dimension is dealt in units that stay together (heads, features, rows of a table), nearly evenly, in the order of ranks. Where several
matrices are packed into one (queries, keys and values), each of them is dealt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from echelon.mesh.layout import Runs


def dealt(units: int, size: int, rank: int) -> tuple[int, int]:
    """The units [first, last) of a rank: the first ranks have one more where they do not divide."""
    each, over = divmod(units, size)
    first = rank * each + min(rank, over)
    return first, first + each + (rank < over)


@dataclass(frozen=True)
class Piece:
    """Elements of dimension `dim` of a tensor of `shape` that are here: the same stretch of each of `packed` equal parts of it."""

    shape: tuple[int, ...]
    dim: int
    first: int
    last: int
    packed: int = 1

    @property
    def local_shape(self) -> tuple[int, ...]:
        size = (self.last - self.first) * self.packed
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    @property
    def runs(self) -> tuple[Runs, ...]:
        inner = math.prod(self.shape[self.dim + 1 :])
        outer = math.prod(self.shape[: self.dim])
        period = self.shape[self.dim] // self.packed * inner
        return (Runs(self.first * inner, (self.last - self.first) * inner, period, outer * self.packed),)


def piece(shape: tuple[int, ...], dim: int, units: int, packed: int, size: int, rank: int) -> Piece:
    """A rank's piece of `shape`, whose dimension `dim` is `packed` times `units` units long."""
    first, last = dealt(units, size, rank)
    each = shape[dim] // (packed * units)
    assert each * packed * units == shape[dim], (shape, dim, units, packed)
    return Piece(shape, dim, first * each, last * each, packed)
