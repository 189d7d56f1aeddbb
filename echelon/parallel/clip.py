"""Clipping of global gradients, sparse ones included."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def _gradients(params: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def clip_norm(params: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scales the gradients to a total 2-norm of at most max_norm; returns the norm that they had."""
    grads = _gradients(params)
    if not grads:
        return torch.zeros(())
    values = [g.coalesce().values() if g.is_sparse else g for g in grads]
    total = torch.nn.utils.get_total_norm(values)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(scale)
    return total


def clip_value(params: Iterable[Tensor], limit: float) -> None:
    """Clamps every element of the gradients to [-limit, limit]."""
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if grad.is_sparse:
            grad = grad.coalesce()
            values = grad.values().clamp(-limit, limit)
            param.grad = torch.sparse_coo_tensor(grad.indices(), values, grad.shape, is_coalesced=True)
        else:
            grad.clamp_(-limit, limit)
