"""What coding owes, piece by piece, as checkpoints carry it. Keys: (parameter's name, kind).

residual      [workers, elements]: what each worker's own gradients still owe
residual_sum  [elements]: what the coded sums still owe, each stretch held by the worker that coded it
direction     [columns, rank]: PowerSGD's Q, the same on every worker

Elements are in the order in which the gradient lies in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from echelon.comm.group import Group
from echelon.parallel.buckets import Slot

OWN, SUM, DIRECTION = "residual", "residual_sum", "direction"


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + numel) of the flattened tensor of this shape, for a slot's parameter."""

    slot: Slot
    kind: str
    tensor: Tensor
    """A flat view of what lives: writing it restores."""
    shape: tuple[int, ...]
    start: int
    copies: tuple[int, ...]
    """The ranks that hold this very piece."""
    sums: bool = False
    """Of the slot's sum some rank holds what is owed as well."""

    @classmethod
    def own(cls, slot: Slot, tensor: Tensor, group: Group, sums: bool = False) -> Piece:
        numel = tensor.numel()
        return cls(slot, OWN, tensor, (group.size, numel), group.rank * numel, (group.rank,), sums)

    @classmethod
    def of_sum(cls, slot: Slot, tensor: Tensor, start: int, group: Group) -> Piece:
        return cls(slot, SUM, tensor, (slot.param.numel(),), start, (group.rank,))

    @classmethod
    def direction(cls, slot: Slot, q: Tensor, group: Group) -> Piece:
        return cls(slot, DIRECTION, q.view(-1), tuple(q.shape), 0, tuple(range(group.size)))
