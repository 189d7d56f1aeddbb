"""Who owns which parameter (level 1), and which rows of it lie where (levels 2 and 3): pure."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from echelon.mesh import runs as arithmetic
from echelon.mesh.axes import Mesh
from echelon.mesh.layout import Placed, Runs


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The owner of each parameter: the largest first, each to whoever has least so far. All ranks get the same list."""
    load = [0] * ranks
    chosen = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        chosen[index] = rank
        load[rank] += sizes[index]
    return chosen


def rows(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """Rows [start, stop) of `rank`, as torch.chunk cuts: equal parts, the last ones shorter or empty."""
    each = -(-length // ranks)
    return min(rank * each, length), min((rank + 1) * each, length)


def narrowed(before: Placed, start: int, stop: int, alike: Container[int]) -> Placed:
    """What lies on a rank that keeps elements [start, stop) of those that were there; `alike` are the ranks that keep the same ones."""
    here = tuple(run for _, run in arithmetic.cut(before.runs, start, stop))
    return Placed(before.shape, here, tuple(r for r in before.copies if r in alike), before.counts)


def position(mesh: Mesh, rank: int, shard_workers: int) -> int:
    """A rank's place among the workers that share one copy of what it holds."""
    return next(s.index(rank) for s in sets(mesh.replicas(rank), shard_workers) if rank in s)


def placed_state(shape: tuple[int, ...], owner: int, me: int) -> Placed:
    """The same for optimizer state that lies whole with one rank of the run."""
    here = (Runs(0, math.prod(shape)),) if owner == me else ()
    return Placed(shape, here, (owner,))


def sets(ranks: Sequence[int], shard_workers: int) -> list[list[int]]:
    """Neighbours share one copy of the model: [0, 1, 2, 3] by two is [[0, 1], [2, 3]]. `shard_workers` divides the number of ranks."""
    each = shard_workers or len(ranks)
    return [list(ranks[at : at + each]) for at in range(0, len(ranks), each)]
