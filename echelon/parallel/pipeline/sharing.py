"""A record of a model whose layers workers share (the tensor axis): what must be whole."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from echelon.mesh.layout import Placed
from echelon.parallel.pipeline.record import Leaf, Record
from echelon.parallel.tensor import guard


def check(model: nn.Module, record: Record, placed: Mapping[int, Placed]) -> None:
    """Raises StrategyError where the model's own code uses a parameter that is split: it would see a piece where it means the whole."""
    params = dict(model.named_parameters())
    pieces = {n for n, p in params.items() if id(p) in placed and placed[id(p)].shape != tuple(p.shape)}
    for node in record.nodes:
        used = pieces.intersection(node.names) if not isinstance(node.call, Leaf) else ()
        for name in sorted(used):
            raise guard.misused(name, node.label)
