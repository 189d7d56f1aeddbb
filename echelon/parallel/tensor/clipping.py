"""torch's own clipping, for scripts that call it: the norm of gradients of which each worker has a piece is the whole model's.

clip_grad_norm_ asks a function of its module for the norm. That function is replaced once: where one of the gradients belongs to a split
parameter, the workers of the tensor axis add up what they have, each whole parameter counted once. All of them call it, as they call the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakIdKeyDictionary

from echelon.parallel.tensor.meet import Axis

_split: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Split parameter -> the axis over which it is split."""


def watch(params: Iterable[nn.Parameter], axis: Axis) -> None:
    """From now on the norm of gradients, some of which are of these parameters, is the whole model's."""
    for param in params:
        _split[param] = axis
    for name in ("_get_total_norm", "get_total_norm"):
        inner = getattr(clip_grad, name, None)
        if inner is not None and not hasattr(inner, "of_pieces"):
            outer = _wrapped(inner)
            setattr(clip_grad, name, outer)
            if getattr(nn.utils, name, None) is inner:
                setattr(nn.utils, name, outer)


def _wrapped(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        owners = {id(p.grad): axis for p, axis in _split.items() if p.grad is not None} if _split else {}
        axis = next((owners[id(t)] for t in given if id(t) in owners), None)
        if axis is None:
            return inner(given, norm_type, error_if_nonfinite, foreach)
        counted = [t for t in given if id(t) in owners or axis.rank == 0]
        return _met(
            inner(counted, norm_type, False, foreach), float(norm_type), axis, error_if_nonfinite, given[0]
        )

    total_norm.of_pieces = True  # type: ignore[attr-defined]
    return total_norm


@torch.no_grad()
def _met(mine: Tensor, order: float, axis: Axis, strict: bool, like: Tensor) -> Tensor:
    wire = mine.detach().to(like.device, torch.float64).reshape(1)
    total = axis.max(wire) if math.isinf(order) else axis.sum(wire.pow(order)).pow(1.0 / order)
    if strict and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {order:g} of the gradients is not finite, so it cannot be clipped"
        )
    return total.reshape(()).to(mine.dtype if mine.numel() else like.dtype)


def known(param: Any) -> bool:
    return param in _split
