"""An exponential moving average of the weights, moved once a committed step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """average = decay * average + (1 - decay) * weights; buffers are the model's own."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.live: list[Tensor] = [p for p in model.parameters() if p.is_floating_point()]
        self.shadow: list[Tensor] = [p.detach().clone() for p in self.live]

    @torch.no_grad()
    def update(self) -> None:
        if self.shadow:
            torch._foreach_lerp_(self.shadow, [p.detach() for p in self.live], 1.0 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the model's weights are the average."""
        with torch.no_grad():
            kept = [p.detach().clone() for p in self.live]
            torch._foreach_copy_([p.detach() for p in self.live], self.shadow)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_([p.detach() for p in self.live], kept)
