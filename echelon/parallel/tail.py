"""The tail of a model's last bucket: what ranks tell each other in every meeting, without a message of its own.

[ranks, number, number², late, stop, used bit of each parameter …]    summed over ranks like the gradients beside it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.clock import Deadline
from echelon.comm.group import Group
from echelon.errors import LoopError

HEAD = 5
CYCLE = 250
"""Micro-steps are numbered modulo this, so that sums of squares over 250 ranks stay exact in float32."""


@dataclass(frozen=True)
class Head:
    """Sums over ranks."""

    ranks: float
    number: float
    squares: float
    late: float
    stop: float

    @property
    def some_stop(self) -> bool:
        """Some rank was asked to stop: all of them know now, at the same step."""
        return self.stop > 0.5

    @property
    def same_place(self) -> bool:
        """Every rank was in the same micro-step (equality in Cauchy-Schwarz)."""
        return abs(self.ranks * self.squares - self.number**2) < 0.5

    @property
    def some_late(self) -> bool:
        """Some ranks had a backward in this micro-step and some had none."""
        return 0.5 < self.late < self.ranks - 0.5


def write(tail: Tensor, number: int, late: bool, stop: bool, used: Sequence[float]) -> None:
    n = float(number % CYCLE)
    tail.copy_(torch.tensor([1.0, n, n * n, float(late), float(stop), *used], dtype=tail.dtype))


def head(tail: Tensor) -> Head:
    return Head(*tail[:HEAD].tolist())


class Later:
    """The head of the last meeting on a GPU: read one meeting later, when the GPU is past it, so that nobody waits."""

    def __init__(self) -> None:
        self.copy: Tensor | None = None
        self.event: torch.cuda.Event | None = None

    def swap(self, tail: Tensor) -> Head | None:
        """The head of the meeting before this one; None at the first."""
        before = None
        if self.copy is not None and self.event is not None:
            self.event.synchronize()
            before = Head(*self.copy.tolist())
        if self.copy is None:
            self.copy = torch.empty(HEAD, dtype=tail.dtype, pin_memory=True)
        self.copy.copy_(tail[:HEAD], non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record()
        return before


def used(tail: Tensor) -> list[float]:
    values: list[float] = tail[HEAD:].tolist()
    return values


def place(number: int, saves: int) -> int:
    """Where a rank is, in one number: its micro-step, and how often its script asked for a checkpoint."""
    return number + 7 * saves


def misplaced(group: Group, number: int, saves: int, deadline: Deadline) -> LoopError:
    """The error for ranks that met in different places; all of them ask, so all hear where the others are."""
    mine = torch.tensor([number, saves], device=group.buffer(0).device)
    every = torch.zeros(group.size, 2, dtype=torch.int64, device=mine.device)
    group.all_gather(every, mine).wait(deadline)
    calls = every[:, 1].tolist()
    if len(set(every[:, 0].tolist())) == 1 and len(set(calls)) > 1:
        who = ", ".join(f"worker {rank} {n} time{'s' * (n != 1)}" for rank, n in enumerate(calls))
        return LoopError(
            f"run.checkpoint() was called by some workers only: {who}",
            remedy="Every worker saves its share: call it on all of them, without `if run.is_main`.",
        )
    where = ", ".join(f"worker {rank} in its {n}." for rank, n in enumerate(every[:, 0].tolist()))
    return LoopError(
        f"the workers' gradients are of different batches: {where}",
        remedy="Some worker skipped or repeated an iteration (continue, break, an exception that was caught): "
        "decide such things together, e.g. with run.reduce.",
    )
