"""A worker's part of a batch as micro-batches. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from echelon.data import deal, tree
from echelon.parallel.pipeline.contract import MicroBatch


def count(args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> int:
    """Samples: rows of the target, or of the inputs where it has none."""
    found = tree.tensors(target) or tree.tensors((args, kwargs))
    return found[0].shape[0] if found and found[0].dim() else 1


def even(n: int, pieces: int) -> list[int]:
    """n rows in so many pieces."""
    return [hi - lo for lo, hi in (deal.part(n, i, pieces) for i in range(pieces))]


def cut(
    inputs: tuple[tuple[Any, ...], Mapping[str, Any], Any], n: int, sizes: Sequence[int], mean: bool
) -> list[MicroBatch]:
    """What has a row for each of the n samples is cut, what has not is given to all. A size of 0 is a stand-in: the first sample
    again, which counts for nothing. Others count by their rows, where the loss is a `mean`."""
    args, kwargs, target = inputs
    micros, lo = [], 0
    for size in sizes:
        at, to = (lo, lo + size) if size else (0, 1)

        def rows(t: Tensor, at: int = at, to: int = to) -> Tensor:
            return t[at:to] if t.dim() and t.shape[0] == n and len(sizes) > 1 else t

        own, named, wanted = tree.map_tree(rows, (args, dict(kwargs), target))
        weight = size / n if mean and size else 1.0
        micros.append(MicroBatch(own, named, wanted, weight, counts=size > 0, rows=to - at))
        lo += size
    return micros
