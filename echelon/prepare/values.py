"""run.reduce: numbers and tensors over all workers, weighted by samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echelon import activity
from echelon.parallel.exchange import Exchange, ReduceOp
from echelon.step import Machine


class Values:
    """Knows how much this rank counts for."""

    def __init__(self, machine: Machine, exchange: Exchange) -> None:
        self.machine, self.exchange = machine, exchange

    def samples(self) -> float:
        """This rank's samples of the current batch, or of the loop that just ended; 1 when there was none."""
        current = self.machine.current
        if current is not None and current.part is not None:
            return float(current.part.count)
        return float(self.machine.last_loop) or 1.0

    @activity.named("run.reduce")
    def reduce(self, x: Any, op: ReduceOp, device: torch.device) -> Any:
        """A tensor gives a tensor, a number a number (floats in float64, bools counted as 0 and 1)."""
        if isinstance(x, Tensor):
            tensor = x
        else:
            tensor = torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None, device=device)
        if tensor.dtype is torch.bool:
            tensor = tensor.to(torch.int64)
        result = self.exchange.reduce(tensor, op, self.samples())
        return result if isinstance(x, Tensor) else result.item()

    def global_loss(self, loss: Any) -> Any:
        """A part's loss -> the loss over the global batch (mean by samples, or the sum)."""
        if not isinstance(loss, Tensor) or self.machine.strategy.alone:
            return loss  # a worker's own batch is a whole one
        op: ReduceOp = "sum" if self.machine.strategy.loss == "sum" else "mean"
        return self.exchange.reduce(loss, op, self.samples())
