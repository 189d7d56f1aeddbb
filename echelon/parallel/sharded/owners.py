"""Who owns which parameter (level 1), and which rows of it lie where (levels 2 and 3): pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def placed(shape: tuple[int, ...], ranks: Sequence[Sequence[int]], me: int) -> Placed:
    """How a parameter of this shape lies on rank `me`; `ranks` are the sets of workers that share one copy, in their order."""
    mine = next(list(workers) for workers in ranks if me in workers)
    at = mine.index(me)
    start, stop = rows(shape[0], len(mine), at)
    width = math.prod(shape[1:])
    runs = (Runs(start * width, (stop - start) * width),) if stop > start and width else ()
    return Placed(shape, runs, tuple(sorted(workers[at] for workers in ranks)))


def placed_state(shape: tuple[int, ...], owner: int, me: int) -> Placed:
    """The same for optimizer state that lies whole with one rank of the run."""
    here = (Runs(0, math.prod(shape)),) if owner == me else ()
    return Placed(shape, here, (owner,))


def sets(ranks: Sequence[int], shard_workers: int) -> list[list[int]]:
    """Neighbours share one copy of the model: [0, 1, 2, 3] by two is [[0, 1], [2, 3]]. `shard_workers` divides the number of ranks."""
    each = shard_workers or len(ranks)
    return [list(ranks[at : at + each]) for at in range(0, len(ranks), each)]
