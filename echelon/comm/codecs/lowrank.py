"""powersgd: a gradient matrix M as P Qᵀ of a small rank, by one step of the power iteration from the last step's Q.

P = M Q and Q = Mᵀ P are linear in M, so payloads are summed on the way like plain gradients. Vectors stay exact.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

WORTH = 2.0
"""A matrix is coded if that makes it at least this many times smaller."""

DEPENDENT = 1e-4
"""A column of which the others leave less than this share is of no use: rounding has made the rest of it."""


def matrix_of(shape: Sequence[int], strides: Sequence[int], rank: int) -> tuple[int, int] | None:
    """(rows, columns) of a gradient as it lies in memory, or None where rank `rank` does not pay.

    Rows run along the dim with the largest stride: the first one, also under channels_last.
    """
    if len(shape) < 2:
        return None
    rows = shape[max(range(len(shape)), key=lambda dim: (shape[dim] > 1, strides[dim]))]
    cols = math.prod(shape) // max(rows, 1)
    pays = WORTH * rank * (rows + cols) <= rows * cols
    return (rows, cols) if pays else None


def start(name: str, cols: int, rank: int, like: Tensor) -> Tensor:
    """The first Q: random, the same on every rank and in every run."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(cols, rank, generator=generator).to(like)


def orthonormal(p: Tensor) -> Tensor:
    """The columns of p made orthonormal, in order. Columns that depend on earlier ones become 0, NaN stays NaN."""
    columns: list[Tensor] = []
    for column in p.unbind(1):
        before = column.norm()
        for _ in range(2):  # once is not enough where columns nearly agree
            for done in columns:
                column = column - done * torch.dot(done, column)
        left = column.norm()
        columns.append(torch.where(left <= DEPENDENT * before, torch.zeros_like(column), column / left))
    return torch.stack(columns, 1)


def revived(q: Tensor, first: Tensor) -> Tensor:
    """Columns of Q that became 0 (a gradient that was 0 everywhere) start anew, else they would stay 0 for ever."""
    return torch.where((q == 0).all(0, keepdim=True), first, q)
