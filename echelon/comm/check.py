"""What may be asked of a Group: every implementation checks its arguments here, before anything begins.

A wrong argument would otherwise be a wrong number, or on some carriers the end of the process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.errors import UsageError

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
INTEGERS = frozenset({
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
})  # fmt: skip
BITS = frozenset({"and", "or", "xor"})
OPS = frozenset({"sum", "avg", "min", "max", "prod"}) | BITS


def plain(x: Tensor) -> bool:
    """Is this tensor plain memory, one element after the other?"""
    return x.layout is torch.strided and x.is_contiguous() and not x.is_conj() and not x.is_neg()


def whole(verb: str, **tensors: Tensor | None) -> None:
    """All of them must be plain memory."""
    for name, x in tensors.items():
        if x is None or plain(x):
            continue
        if x.layout is not torch.strided:
            raise UsageError(
                f"{verb}: {name} is a {x.layout} tensor", remedy=f"Pass its indices and values, or {name}.to_dense()."
            )  # fmt: skip
        raise UsageError(
            f"{verb}: {name} of shape {tuple(x.shape)} is not contiguous (strides {x.stride()})",
            remedy=f"Pass {name}.contiguous(), and copy the result back if {name} receives one.",
        )


def has_meaning(dtype: torch.dtype, op: str) -> bool:
    try:
        reducible("", dtype, op)
    except UsageError:
        return False
    return True


def reducible(verb: str, dtype: torch.dtype, op: str) -> None:
    """Has this operation a meaning for this type?"""
    if op not in OPS:
        raise UsageError(
            f"{verb}: there is no operation {op!r}", remedy=f"Use one of {', '.join(sorted(OPS))}."
        )
    integer = dtype in INTEGERS or dtype is torch.bool
    if not (integer or dtype in FLOATS or dtype in COMPLEX):
        raise UsageError(f"{verb}: tensors of {dtype} cannot be reduced", remedy="Convert to float32 first.")
    if op in BITS and not integer:
        raise UsageError(f"{verb}: {op!r} works on the bits of integers and bools, not on {dtype}")
    if op == "avg" and integer:
        raise UsageError(
            f"{verb}: an average of {dtype} would be rounded",
            remedy="Convert to a float type, or sum and divide.",
        )
    if op not in ("sum", "avg") and dtype in COMPLEX:
        raise UsageError(f"{verb}: {op!r} is not defined for {dtype}", remedy="Only sum and avg are.")


def rank(verb: str, name: str, value: int, size: int) -> None:
    if not 0 <= value < size:
        raise UsageError(f"{verb}: {name} is {value}, but the group has ranks 0 to {size - 1}")


def other(verb: str, peer: int | None, mine: int, size: int) -> None:
    """Is `peer` (None: anybody) another rank?"""
    if size == 1 or peer == mine:
        raise UsageError(
            f"{verb}: rank {mine} of {size} cannot {verb} to or from itself",
            remedy="Copy the tensor instead.",
        )
    if peer is not None:
        rank(verb, "peer", peer, size)


def stacked(verb: str, many: Tensor, one: Tensor, size: int) -> None:
    """Has `many` one more leading dim than `one`, a row for each rank?"""
    if many.shape != (size, *one.shape) or many.dtype != one.dtype:
        raise UsageError(
            f"{verb}: {tuple(many.shape)} {many.dtype} is not one {tuple(one.shape)} {one.dtype} for each of"
            f" {size} ranks",
            remedy=f"Its shape must be {(size, *one.shape)}.",
        )


def only_on_root(verb: str, name: str, x: Tensor | None, one: Tensor, at_root: bool, size: int) -> None:
    """Is `x` given on root, with a row for each rank, and nowhere else?"""
    if at_root and x is None:
        raise UsageError(f"{verb}: the root must give {name}, of shape {(size, *one.shape)}")
    if x is not None:
        if not at_root:
            raise UsageError(f"{verb}: {name} is for the root alone", remedy=f"Pass {name}=None elsewhere.")
        stacked(verb, x, one, size)


def cut(verb: str, name: str, x: Tensor, counts: Sequence[int], size: int) -> None:
    """Do these counts cut the flat tensor into one piece a rank?"""
    if x.dim() != 1 or len(counts) != size or min(counts, default=0) < 0 or sum(counts) != x.numel():
        raise UsageError(
            f"{verb}: counts {list(counts)} do not cut {name} of shape {tuple(x.shape)} into {size} pieces",
            remedy="Tensors are flat; counts are elements, one a rank, and sum to the tensor's length.",
        )
