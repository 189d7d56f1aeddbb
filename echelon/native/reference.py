"""Each kernel of the core in plain torch: what it must give, bit for bit, and what runs where it was not built."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add, "avg": torch.add, "min": torch.minimum, "max": torch.maximum, "prod": torch.mul,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
}  # fmt: skip
_OF_BOOLS = {"sum": "or", "max": "or", "prod": "and", "min": "and"}
_HALVES = (torch.float16, torch.bfloat16)
_AS = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
"""Types that torch cannot add: in a wider one (uint64: the same bits, except for min and max)."""


def fold(dst: Tensor, srcs: Sequence[Tensor], op: str) -> None:
    """dst = srcs[0] op srcs[1] op …, in this order. float16 and bfloat16 are combined in float32 and rounded once."""
    dtype = dst.dtype
    op = _OF_BOOLS.get(op, op) if dtype is torch.bool else op
    wide = torch.float32 if dtype in _HALVES else _AS.get(dtype, dtype)
    flip = torch.iinfo(torch.int64).min if dtype is torch.uint64 and op in ("min", "max") else 0
    total = srcs[0].to(wide) ^ flip if flip else srcs[0].to(wide)
    for x in srcs[1:]:
        total = _COMBINE[op](total, x.to(wide) ^ flip if flip else x.to(wide))
    if op == "avg":
        total = total / len(srcs)
    dst.copy_((total ^ flip if flip else total).to(dtype))
