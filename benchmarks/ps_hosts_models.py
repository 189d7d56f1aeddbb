"""A model that is nearly all communication, an optimizer that does nothing, and steps of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from echelon.run import Run
from echelon.strategy import Strategy

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


class Side:
    """The model under `strategy`, in a launch that runs already; `world` in place of all that the launch has."""

    def __init__(self, first: Run, strategy: Strategy, mib: float, world: Any = None) -> None:
        self.run = Run(first.place, strategy, None, first.emit, world=world or first.world)
        model = Flat(mib)
        self.model, self.optimizer = self.run.prepare(model, Nothing(model.parameters()))
        self.x = torch.ones(8)

    def step(self) -> None:
        self.model(self.x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
