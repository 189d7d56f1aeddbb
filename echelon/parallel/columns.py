"""The first layer of a model whose input columns lie on several workers: each has the columns' weights, and what it makes of them meets.

    forward    every worker gives its part of the layer's output to the owner of the labels, which adds them up in rank order
    backward   the owner answers with the gradient of that output, and each makes the gradient of its own weights of it

Messages go between a worker and the owner only. A lost peer is told to `lost`; the tensor is of no use then, and the step is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon import activity
from echelon.clock import Deadline
from echelon.comm.group import Group, Lost, Outcome, Work
from echelon.errors import LoopError
from echelon.mesh.layout import Runs

LIMIT_S = 1800.0
WHAT = "a first layer whose columns lie on several workers"


@dataclass(frozen=True)
class Mark:
    """Which forward a part belongs to: workers that are not at the same one must not be added up."""

    call: int
    rows: int
    batch: int
    """A number that the rows of a batch have in common; 0 where it is not known."""


class Wire:
    """Between the workers and the owner. All call the same in the same order."""

    def __init__(self, group: Group, owner: int, lost: Callable[[Outcome], None]) -> None:
        self.group, self.owner, self.lost = group, owner, lost
        self.others = [rank for rank in range(group.size) if rank != owner]
        self.waited_s = 0.0

    @property
    def owns(self) -> bool:
        return self.group.rank == self.owner

    @activity.named(WHAT)
    def give(self, part: Tensor, mark: Mark) -> None:
        """To the owner."""
        for x in (_head(mark, part), part.detach().contiguous()):
            self._met(self.group.send(x, self.owner))

    @activity.named(WHAT)
    def take(self, part: Tensor, mark: Mark) -> Tensor:
        """The sum of all parts in the order of ranks, on the owner; `part` is its own."""
        parts = {self.owner: part}
        for rank in self.others:
            head, theirs = _head(mark, part), torch.empty_like(part)
            if self._met(self.group.recv(head, rank)):
                _compare(rank, self.owner, Mark(*head.tolist()), mark)
                self._met(self.group.recv(theirs, rank))
            parts[rank] = theirs
        return torch.stack([parts[rank] for rank in sorted(parts)]).sum(0)

    @activity.named(WHAT)
    def answer(self, grad: Tensor) -> None:
        """The gradient of the sum, from the owner to everybody."""
        grad = grad.contiguous()
        works = [self.group.send(grad, rank) for rank in self.others]
        for work in works:
            self._met(work)

    @activity.named(WHAT)
    def hear(self, like: Tensor) -> Tensor:
        """What the owner answers."""
        grad = torch.zeros_like(like)
        self._met(self.group.recv(grad, self.owner))
        return grad

    @activity.named(WHAT)
    def tell(self, x: Tensor) -> Tensor:
        """The owner's x, on all."""
        self._met(self.group.broadcast(x, self.owner))
        return x

    def _met(self, work: Work) -> bool:
        began = time.perf_counter()
        outcome = work.wait(Deadline.after(LIMIT_S))
        self.waited_s += time.perf_counter() - began
        if isinstance(outcome, Lost):
            self.lost(outcome)
            return False
        return True


def _head(mark: Mark, part: Tensor) -> Tensor:
    return torch.tensor([mark.call, mark.rows, mark.batch], dtype=torch.int64, device=part.device)


def _compare(rank: int, owner: int, theirs: Mark, mine: Mark) -> None:
    if theirs == mine:
        return
    if theirs.call != mine.call:
        what = f"is at forward {theirs.call}, and worker {owner} at {mine.call}"
    elif theirs.rows != mine.rows:
        what = f"has {theirs.rows} rows in a batch, and worker {owner} {mine.rows}"
    else:
        what = f"took other rows of the table than worker {owner} into this batch"
    raise LoopError(
        f"worker {rank} {what}",
        remedy="All workers must take the same rows in the same order: the same script, batch size and sampler, and no generator with a seed of its own.",
    )


class _Meet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, first: First) -> Tensor:
        ctx.first = first
        return first.wire.take(part, first.mark)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.first.answer(grads[0])
        return grads[0], None


class First:
    """The layer's forward, on the instance. `mark` is set before every use, and `given` to what the model was called with."""

    def __init__(self, layer: nn.Linear, name: str, width: int, wire: Wire) -> None:
        self.layer, self.name, self.width, self.wire = layer, name, width, wire
        self.mark = Mark(0, 0, 0)
        self.given: Tensor | None = None
        self.used = self.owes = False
        """Since `mark` was set: the layer was used; the others wait for a gradient."""
        layer.__dict__["forward"] = self

    def part(self, x: Tensor) -> Tensor:
        """What this worker's columns add to the output."""
        if x.dim() != 2 or x.shape[1] != self.width:
            raise LoopError(
                f"the model got an input of shape {tuple(x.shape)}, and this worker has {self.width} columns of the table",
                remedy="Give the model the batch's columns as they come from the loader: (inputs, target) of Columns.",
            )
        if not self.width:
            return x.new_zeros(x.shape[0], self.layer.out_features)
        return F.linear(x, self.layer.weight)

    def __call__(self, input: Tensor) -> Tensor:
        """On the owner, inside the model's forward."""
        if input is not self.given:
            raise LoopError(
                f"`{self.name}` must get the model's input as it is: its columns lie on several workers, and each has only its own",
                remedy="Scale or clean columns in the data set, on the worker that has them.",
            )
        if self.used:
            raise LoopError(
                f"`{self.name}` was used twice for one batch, and the other workers have given their part once",
                remedy="Call the model once for each batch.",
            )
        self.used = True
        part = self.part(input)
        if torch.is_grad_enabled() and self.layer.weight.requires_grad:
            self.owes = True
            part = part if part.requires_grad else part.requires_grad_()
        out: Tensor = _Meet.apply(part, self)
        return out if self.layer.bias is None else out + self.layer.bias.to(out.dtype)

    def answer(self, grad: Tensor) -> None:
        self.owes = False
        self.wire.answer(grad)


def runs_of(columns: Sequence[int], shape: tuple[int, int]) -> tuple[Runs, ...]:
    """Where the elements of a weight's columns lie in the whole weight, row by row."""
    rows, width = shape
    stretches: list[list[int]] = []
    for column in columns:
        if stretches and column == stretches[-1][1]:
            stretches[-1][1] += 1
        else:
            stretches.append([column, column + 1])
    if len(stretches) == 1:
        first, last = stretches[0]
        return (Runs(first, last - first, width, rows),)
    return tuple(Runs(row * width + a, b - a) for row in range(rows) for a, b in stretches)
