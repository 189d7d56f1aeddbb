"""Ways in which a tensor may lie on ranks, for tests: each gives every rank's Placed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from echelon.mesh.layout import Placed, Runs


def bounds(numel: int, ways: int) -> list[int]:
    return [numel * way // ways for way in range(ways + 1)]


def whole(shape: tuple[int, ...], size: int) -> list[Placed]:
    return [Placed(shape, (Runs(0, math.prod(shape)),), tuple(range(size))) for _ in range(size)]


def stretches(shape: tuple[int, ...], size: int) -> list[Placed]:
    """Sharded without regard to rows."""
    at = bounds(math.prod(shape), size)
    runs = [(Runs(at[r], at[r + 1] - at[r]),) if at[r] < at[r + 1] else () for r in range(size)]
    return [Placed(shape, runs[r], (r,)) for r in range(size)]


def along(shape: tuple[int, ...], size: int, dim: int, copies: int = 1) -> list[Placed]:
    """Split along a dimension over size / copies ranks; neighbours hold the same."""
    ways, inner = size // copies, math.prod(shape[dim + 1 :])
    at = bounds(shape[dim], ways)
    placed = []
    for rank in range(size):
        way = rank // copies
        length = (at[way + 1] - at[way]) * inner
        run = Runs(at[way] * inner, length, shape[dim] * inner, math.prod(shape[:dim]))
        held = tuple(range(way * copies, (way + 1) * copies))
        placed.append(Placed(shape, (run,) if run.numel else (), held))
    return placed


def packed(shape: tuple[int, ...], size: int, parts: int = 3) -> list[Placed]:
    """Rows of each of `parts` matrices in one (query, key, value by heads)."""
    rows, inner = shape[0] // parts, math.prod(shape[1:])
    at = bounds(rows, size)
    return [
        Placed(shape, tuple(Runs((part * rows + at[r]) * inner, (at[r + 1] - at[r]) * inner) for part in range(parts)
                            if at[r] < at[r + 1]), (r,))
        for r in range(size)
    ]  # fmt: skip


def staged(shape: tuple[int, ...], size: int, stage: int) -> list[Placed]:
    """On one rank of a pipeline, and a placeholder elsewhere."""
    every = (Runs(0, math.prod(shape)),)
    return [Placed(shape, every if r == stage else (), (stage,)) for r in range(size)]


def grid(shape: tuple[int, ...], rows: int, columns: int) -> list[Placed]:
    """Rows over one axis of ranks, columns over the other."""
    down, across = bounds(shape[0], rows), bounds(shape[1], columns)
    found = []
    for rank in range(rows * columns):
        r, c = divmod(rank, columns)
        run = Runs(down[r] * shape[1] + across[c], across[c + 1] - across[c], shape[1], down[r + 1] - down[r])
        found.append(Placed(shape, (run,) if run.numel else (), (rank,)))
    return found


def here(tensor: Tensor, placed: Placed) -> Tensor:
    """What of the tensor is on the rank: a copy, flat."""
    flat = tensor.reshape(-1)
    picked = [flat[index(run)] for run in placed.runs]
    return torch.cat(picked) if picked else flat[:0].clone()


def index(run: Runs) -> Tensor:
    """The elements of a run, one by one: what all arithmetic is compared with."""
    rows = torch.arange(run.count)[:, None] * run.period + torch.arange(run.length)[None]
    return (rows + run.start).reshape(-1)


def names() -> dict[str, Any]:
    """Layouts of a matrix (12, 10), and by how many ranks."""
    return {
        "whole": (lambda s: whole(s, 2), 2),
        "rows/4": (lambda s: along(s, 4, 0), 4),
        "rows/3, two copies": (lambda s: along(s, 6, 0, 2), 6),
        "columns/3": (lambda s: along(s, 3, 1), 3),
        "columns/2, two copies": (lambda s: along(s, 4, 1, 2), 4),
        "packed/2": (lambda s: packed(s, 2), 2),
        "stretches/5": (lambda s: stretches(s, 5), 5),
        "stage 1 of 3": (lambda s: staged(s, 3, 1), 3),
        "grid 2 x 3": (lambda s: grid(s, 2, 3), 6),
    }
