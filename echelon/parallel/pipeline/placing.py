"""What a rank keeps of a model that is cut into stages: its own stage's tensors. The others become placeholders.

A placeholder is the same Parameter object with the same shape, so names, optimizers and schedulers go on holding it. It has no
memory of its own (one element, expanded) and is NaN: whoever computes with it by mistake sees that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from echelon.mesh.layout import Placed, Runs
from echelon.parallel.building.recipe import placeholder


def is_placeholder(tensor: Tensor) -> bool:
    return tensor.dim() > 0 and tensor.numel() > 1 and all(stride == 0 for stride in tensor.stride())


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, tied ones under their first."""
    yield from model.named_parameters()
    yield from model.named_buffers()


@dataclass(frozen=True)
class Seat:
    """Which stages this rank has, and which ranks have each."""

    stages: frozenset[int]
    holders: Mapping[int, Sequence[int]]
    """Stage -> ranks of the run."""

    counts: bool = True
    """False where another rank of the same replica of the model has the same stage."""


@torch.no_grad()
def keep(
    model: nn.Module, users: Mapping[str, Sequence[int]], seat: Seat, placed: MutableMapping[int, Placed]
) -> None:
    """Frees what no stage of this rank uses. `users` says which stages use a tensor; what nobody uses is stage 0's.

    `placed` says how each tensor lies here if it is split already, and is told how it lies afterwards. A tensor of several stages
    lies on all their ranks, and counts with the first."""
    for name, tensor in tensors(model):
        using = tuple(users.get(name, ())) or (0,)
        holders = {rank for stage in using for rank in seat.holders[stage]}
        whole = Placed(tuple(tensor.shape), (Runs(0, tensor.numel()),), tuple(sorted(holders)))
        before = placed.get(id(tensor), whole)
        copies = tuple(rank for rank in before.copies if rank in holders)
        if seat.stages.isdisjoint(using):
            tensor.data = placeholder(tensor)
            placed[id(tensor)] = Placed(before.shape, (), copies, counts=False)
        else:
            counts = before.counts and seat.counts and using[0] in seat.stages
            placed[id(tensor)] = Placed(before.shape, before.runs, copies, counts)
