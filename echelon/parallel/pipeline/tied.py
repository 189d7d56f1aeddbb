"""Parameters that several stages use: each stage has a copy, and all copies see the sum of their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from echelon.clock import Deadline
from echelon.comm.group import Group, Met, Outcome, merge


class Tied:
    """`copies`: every such parameter of the group's ranks, and whether this rank uses it (else only its shape counts).

    Where several workers have the same stage only one of them `adds`: their gradients have met already."""

    def __init__(self, copies: Sequence[tuple[nn.Parameter, bool]], group: Group, adds: bool) -> None:
        self.copies, self.group, self.adds = list(copies), group, adds

    @torch.no_grad()
    def meet(self, deadline: Deadline) -> Outcome:
        """Every rank of the group calls it once `.grad` is what the workers of its own stage agree on; blocks. One message a type."""
        kinds: dict[tuple[torch.dtype, torch.device], list[tuple[nn.Parameter, bool]]] = {}
        for param, here in self.copies:
            kinds.setdefault((param.dtype, param.device), []).append((param, here))
        return merge([self._one(alike, deadline) for alike in kinds.values()])

    def _one(self, alike: list[tuple[nn.Parameter, bool]], deadline: Deadline) -> Outcome:
        first, _ = alike[0]
        sizes = [param.numel() for param, _ in alike]
        flat = torch.zeros(sum(sizes) + len(alike), dtype=first.dtype, device=first.device)
        views, used = flat[: sum(sizes)].split(sizes), flat[sum(sizes) :]
        for at, (param, here) in enumerate(alike):
            if here and param.grad is not None and self.adds:
                views[at].copy_(param.grad.reshape(-1))
                used[at] = 1
        outcome = self.group.all_reduce(flat).wait(deadline)
        if not isinstance(outcome, Met):
            return outcome
        for at, (param, here) in enumerate(alike):
            if not here or not used[at]:
                continue
            total = views[at].view(param.shape)
            if param.grad is None:
                param.grad = total.clone()
            else:
                param.grad.copy_(total)
        return outcome
