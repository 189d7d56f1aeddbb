"""Reductions without a carrier, and types that a carrier cannot reduce as types that it can.

gloo and torch's own operators lack some integers. Each is carried as a wider one, or by its bits, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.comm.group import Op
from echelon.native import reference

_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_BOOLS: dict[str, Op] = {"sum": "max", "prod": "min"}
_SIGN = -(2**63)


class Carried(NamedTuple):
    """`tensor` is reduced by `op` instead; then `back()` puts the result into the tensor that was meant."""

    tensor: Tensor
    op: Op
    back: Callable[[], object] | None


def carried(x: Tensor, op: Op) -> Carried:
    """x in a type that everybody can reduce, in the same memory where that is possible (`back` is then None)."""
    if x.dtype is torch.bool:
        return Carried(x.view(torch.uint8), _BOOLS.get(op, op), None)
    if x.dtype.is_complex:
        return Carried(torch.view_as_real(x), op, None)
    if x.dtype in _WIDER:
        wide = x.to(_WIDER[x.dtype])
        return Carried(wide, op, lambda: x.copy_(wide))
    if x.dtype is torch.uint64:
        bits = x.view(torch.int64)
        if op not in ("min", "max"):
            return Carried(bits, op, None)
        shifted = bits ^ _SIGN  # so that the order of signed numbers is that of unsigned ones
        return Carried(shifted, op, lambda: bits.copy_(shifted ^ _SIGN))
    return Carried(x, op, None)


def reduced(parts: Sequence[Tensor], op: Op) -> Tensor:
    """The reduction of these tensors in rank order, as a new one."""
    result = torch.empty_like(parts[0])
    if result.is_complex():
        reference.fold(torch.view_as_real(result), [torch.view_as_real(part) for part in parts], op)
    else:
        reference.fold(result, parts, op)
    return result


def as_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor as flat uint8: for operations that only move."""
    return x.reshape(-1).view(torch.uint8)
