"""Parameters that several stages use: each stage has a copy, and all copies see the sum of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from echelon.clock import Deadline
from echelon.comm.group import Group, Met, Outcome, merge


@dataclass(frozen=True)
class Copy:
    """A parameter that several stages use, as this rank has it."""

    param: nn.Parameter
    here: bool
    """This rank uses it."""
    numel: int
    """Elements of it that a rank keeps that does."""


class Tied:
    """`copies`: every such parameter of the group's ranks, in one order.

    Where several workers have the same stage only one of them `adds`: their gradients have met already."""

    def __init__(self, copies: Sequence[Copy], group: Group, adds: bool) -> None:
        self.copies, self.group, self.adds = list(copies), group, adds

    @torch.no_grad()
    def meet(self, deadline: Deadline) -> Outcome:
        """Every rank of the group calls it once `.grad` is what the workers of its own stage agree on; blocks. One message a type."""
        kinds: dict[tuple[torch.dtype, torch.device], list[Copy]] = {}
        for copy in self.copies:
            kinds.setdefault((copy.param.dtype, copy.param.device), []).append(copy)
        return merge([self._one(alike, deadline) for alike in kinds.values()])

    def _one(self, alike: list[Copy], deadline: Deadline) -> Outcome:
        first = alike[0].param
        sizes = [copy.numel for copy in alike]
        flat = torch.zeros(sum(sizes) + len(alike), dtype=first.dtype, device=first.device)
        views, used = flat[: sum(sizes)].split(sizes), flat[sum(sizes) :]
        for at, copy in enumerate(alike):
            if copy.here and copy.param.grad is not None and self.adds:
                views[at].copy_(copy.param.grad.reshape(-1))
                used[at] = 1
        outcome = self.group.all_reduce(flat).wait(deadline)
        if not isinstance(outcome, Met):
            return outcome
        for at, copy in enumerate(alike):
            if not copy.here or not used[at]:
                continue
            param = copy.param
            total = views[at].view(param.shape)
            if param.grad is None:
                param.grad = total.clone()
            else:
                param.grad.copy_(total)
        return outcome
