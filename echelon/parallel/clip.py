"""Clipping of global gradients: sparse ones, and those that lie in pieces on several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from echelon.parallel.gradsync import Split
from echelon.parallel.local import local


def clip_norm(params: Iterable[Tensor], max_norm: float, split: Split | None = None) -> Tensor:
    """Scales the gradients to a total 2-norm of at most max_norm; returns the norm that they had.

    Where parameters are split, all ranks that hold one replica of the model call this together, and each scales what it has.
    """
    params = list(params)
    grads = [local(p.grad) for p in params if p.grad is not None]
    if split is not None and split.over(params) is not None:
        total = split_norm(params, split)
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        total = total.to(grads[0].dtype if grads else params[0].dtype)
    elif not grads:
        return torch.zeros(())
    else:
        total = torch.nn.utils.get_total_norm(_values(grads))
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(scale)
    return total


@torch.no_grad()
def split_norm(params: Sequence[Tensor], split: Split) -> Tensor:
    """The 2-norm of all gradients of a model that several ranks hold together, in float64 and the same bits on all of them. PeerLost
    when one is gone."""
    counted = [local(p.grad) for p in params if p.grad is not None and split.counts(p)]
    device = local(params[0]).device
    norms = torch._foreach_norm(_values(counted), 2, torch.float64) if counted else []
    squares = torch.zeros(1, dtype=torch.float64, device=device)
    for norm in norms:
        squares += norm.to(device).square()
    return split.meet(squares).sqrt().squeeze(0)


def split_squares(squares: float, finite: bool, params: Sequence[Tensor], split: Split) -> tuple[float, bool]:
    """What servers say of this rank's parameters -> of the whole model's."""
    wire = torch.tensor(
        [squares, 0.0 if finite else 1.0], dtype=torch.float64, device=local(params[0]).device
    )
    total, broken = split.meet(wire).tolist()
    return (total, True) if not broken else (math.nan, False)


def clip_value(params: Iterable[Tensor], limit: float) -> None:
    """Clamps every element of the gradients to [-limit, limit]."""
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        grad = local(grad)
        if grad.is_sparse:
            grad = grad.coalesce()
            values = grad.values().clamp(-limit, limit)
            param.grad = torch.sparse_coo_tensor(grad.indices(), values, grad.shape, is_coalesced=True)
        else:
            grad.clamp_(-limit, limit)


def _values(grads: Iterable[Tensor]) -> list[Tensor]:
    return [g.coalesce().values() if g.is_sparse else g for g in grads]
