"""Sums and copies of whole ranges: by several threads through the core, or in plain torch where it was not built. The same bits either way."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from echelon import native
from echelon.errors import UsageError
from echelon.native import reference, threads

LARGE_BYTES = 8 << 20
"""More than a cache holds beside other things: copies of as much go past it (csrc/spread.cpp)."""

SHARED_BYTES = 2 << 20
"""Copies of as much are shared by threads."""

CODES: dict[torch.dtype, int] = {
    torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3, torch.int8: 4, torch.uint8: 5, torch.int16: 6,
    torch.uint16: 7, torch.int32: 8, torch.uint32: 9, torch.int64: 10, torch.uint64: 11, torch.bool: 12,
}  # fmt: skip
"""The types that can be added up, with the core's numbers for them."""


def add(outs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Each of `outs` becomes the sum of `parts`, in their order. All are contiguous, on the CPU, of one type of CODES and equally
    long; an out may be one of the parts. float16 and bfloat16 are added in float32 and rounded once."""
    first = parts[0]
    for x in (*outs, *parts):
        alike = x.dtype is first.dtype and x.numel() == first.numel()
        if not alike or not x.is_contiguous() or x.device.type != "cpu":
            raise UsageError(
                f"a sum needs parts that are alike: {first.numel()} of {first.dtype} met {x.numel()} of {x.dtype}"
            )
    core = native.core()
    if core is None:
        total = torch.empty_like(first)
        reference.fold(total, parts, "sum")
        for out in outs:
            out.copy_(total)
    elif outs:
        core.sum(
            [x.data_ptr() for x in outs], [x.data_ptr() for x in parts], first.numel(), CODES[first.dtype], threads.number()
        )  # fmt: skip


def same(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Is each of them the same bytes as its counterpart? All contiguous, in pairs of one size; what is elsewhere is fetched first."""
    core = native.core()
    pairs = [(a.cpu(), b.cpu()) for a, b in zip(ones, others, strict=True)]
    if any(a.nbytes != b.nbytes or not (a.is_contiguous() and b.is_contiguous()) for a, b in pairs):
        raise UsageError("only tensors of one size, without gaps, can be compared")
    if core is None:
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    return bool(
        core.same(
            [a.data_ptr() for a, _ in pairs], [b.data_ptr() for _, b in pairs], [a.nbytes for a, _ in pairs], threads.number()
        )
    )  # fmt: skip


def copy(into: Tensor, source: Tensor) -> None:
    """Bytes of one contiguous CPU tensor over those of another of the same size, without Python's lock."""
    here, there, size = into.data_ptr(), source.data_ptr(), into.nbytes
    if here == there or not size:
        return
    core = native.core() if size >= SHARED_BYTES else None
    if core is None or threads.number() == 1:
        ctypes.memmove(here, there, size)
    else:
        core.copy(here, there, size, threads.number())
