"""The group of one rank: every operation is over when it begins."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.comm.group import Done, Lost, Op, Outcome, Work


class AloneGroup:
    """A Group of one. `abort` makes it lose like any other, so failures can be tried in one process."""

    rank = 0
    size = 1
    local = True

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self._outcome: Outcome | None = None

    def buffer(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        return Done(self._outcome)

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        out[0].copy_(x)
        return Done(self._outcome)

    def broadcast(self, x: Tensor, root: int = 0) -> Work:
        return Done(self._outcome)

    def barrier(self) -> Work:
        return Done(self._outcome)

    def abort(self, reason: str) -> None:
        self._outcome = Lost((), reason)

    def close(self) -> None:
        pass
