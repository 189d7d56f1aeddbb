"""A model that is nearly all communication, and an optimizer that does nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

LAYERS = 25


class Flat(nn.Module):
    """`mib` of parameters whose gradients cost no computing but being written."""

    def __init__(self, mib: float) -> None:
        super().__init__()
        numel = int(mib * (1 << 20)) // 4 // LAYERS
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(numel)) for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer[0] for layer in self.layers]).sum() * x.mean()


class Nothing(torch.optim.Optimizer):
    """Steps without a pass over memory: what is measured is how gradients meet."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        pass
