"""Cross-entropy of logits of which each worker has a stretch of the classes: they are never gathered.

Three numbers a row meet: the largest logit; then, in one message, the sum of exponentials, the target's logit, and with label smoothing
the sum of all logits. The gradient of a worker's stretch follows from these alone. For whoever asks for gradients of gradients the same is
computed once more from operations that have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echelon.parallel.tensor import meet
from echelon.parallel.tensor.meet import Axis


@dataclass(frozen=True)
class Asked:
    """As torch's cross_entropy is asked, and whose classes lie where."""

    axis: Axis
    classes: int
    ignore_index: int
    smoothing: float
    reduction: str


@dataclass(frozen=True)
class Rows:
    """What is known of each row without its logits."""

    counts: Tensor
    """The row is not ignored."""
    place: Tensor
    """Of the target in this worker's stretch; 0 where it is elsewhere."""
    here: Tensor
    """The target is in this worker's stretch, and counts."""
    scale: Tensor
    """The weight of the target's class; 0 where the row is ignored."""
    weight: Tensor | None
    """Of the classes of this worker's stretch."""
    total_weight: Tensor | float
    """Of all classes."""


def cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None, asked: Asked) -> Tensor:
    """The loss. x: this worker's stretch of the logits, classes last; the rest as torch's."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.float()
    rows = _rows(target, weight, asked, x)
    loss: Tensor = _CrossEntropy.apply(x, rows, asked)  # type: ignore[assignment]
    return loss


def _rows(target: Tensor, weight: Tensor | None, asked: Asked, x: Tensor) -> Rows:
    first, last = asked.axis.mine(asked.classes)
    counts = target != asked.ignore_index
    wrong = counts & ((target < 0) | (target >= asked.classes))
    if x.device.type == "cpu":
        if bool(wrong.any()):
            raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")
    else:
        torch._assert_async(~wrong.any())
    here = counts & (target >= first) & (target < last)
    place = (target - first).masked_fill(~here, 0)
    kind = _accurate(x.dtype)
    if weight is None:
        return Rows(counts, place, here, counts.to(kind), None, float(asked.classes))
    weight = weight.to(kind)
    scale = weight[target.masked_fill(~counts, 0)] * counts
    return Rows(counts, place, here, scale, weight[first:last], weight.sum())


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, asked: Asked) -> Tensor:
        logits = x.to(_accurate(x.dtype))
        top = asked.axis.max(_largest(logits))
        told = [(logits - top.unsqueeze(-1)).exp_().sum(-1), _of_target(logits, rows)]
        if asked.smoothing:
            told.append((logits if rows.weight is None else logits * rows.weight).sum(-1))
        met = asked.axis.sum(torch.stack(told))
        level = top + met[0].log()
        divisor = _divisor(rows, asked)
        ctx.rows, ctx.asked, ctx.divisor_by = rows, asked, divisor
        ctx.save_for_backward(x, level)
        ctx.told_divisor = divisor, asked.reduction  # the first step's self-check asks for it
        return _reduced(level, met[1], met[2] if asked.smoothing else None, rows, asked, divisor).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, level = ctx.saved_tensors
        rows, asked = ctx.rows, ctx.asked
        if torch.is_grad_enabled():  # somebody wants gradients of this gradient
            again = _differentiable(x, rows, asked, ctx.divisor_by).to(x.dtype)
            return torch.autograd.grad(again, x, grads[0], create_graph=True)[0], None, None
        grad = grads[0].to(level.dtype)
        grad = grad if ctx.divisor_by is None else grad / ctx.divisor_by
        share, even = 1.0 - asked.smoothing, asked.smoothing / asked.classes
        each = (grad * rows.scale * share).masked_fill(
            ~rows.counts, 0
        )  # where all are ignored, the divisor is 0
        some = (grad * even).masked_fill(~rows.counts, 0)
        found = (x.to(level.dtype) - level.unsqueeze(-1)).exp_()
        found *= (each + some * rows.total_weight).unsqueeze(-1)
        found.scatter_add_(-1, rows.place.unsqueeze(-1), (-each * rows.here).unsqueeze(-1))
        if asked.smoothing:
            found -= some.unsqueeze(-1) if rows.weight is None else some.unsqueeze(-1) * rows.weight
        return found.to(x.dtype), None, None


def _largest(x: Tensor) -> Tensor:
    return x.detach().amax(-1).contiguous()


def _of_target(x: Tensor, rows: Rows) -> Tensor:
    found = x.gather(-1, rows.place.unsqueeze(-1)).squeeze(-1)
    return found.masked_fill(~rows.here, 0)


def _divisor(rows: Rows, asked: Asked) -> Tensor | None:
    return rows.scale.sum() if asked.reduction == "mean" else None


def _reduced(
    level: Tensor, of_target: Tensor, of_all: Tensor | None, rows: Rows, asked: Asked, divisor: Tensor | None
) -> Tensor:
    """The loss from what is the same on all workers."""
    ignored = ~rows.counts
    loss = ((level - of_target) * rows.scale).masked_fill(ignored, 0)
    if of_all is not None:
        smooth = (level * rows.total_weight - of_all).masked_fill(ignored, 0)
        loss = loss * (1.0 - asked.smoothing) + smooth * (asked.smoothing / asked.classes)
    if asked.reduction == "none":
        return loss
    return loss.sum() if divisor is None else loss.sum() / divisor


def _differentiable(x: Tensor, rows: Rows, asked: Asked, divisor: Tensor | None) -> Tensor:
    logits = x.to(_accurate(x.dtype))
    top = asked.axis.max(_largest(logits))
    level = top + meet.add((logits - top.unsqueeze(-1)).exp().sum(-1), asked.axis).log()
    of_all = None
    if asked.smoothing:
        of_all = meet.add((logits if rows.weight is None else logits * rows.weight).sum(-1), asked.axis)
    return _reduced(level, meet.add(_of_target(logits, rows), asked.axis), of_all, rows, asked, divisor)
