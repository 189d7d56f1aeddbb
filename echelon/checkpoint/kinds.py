"""Element types in files, and tensors as bits: what is saved comes back bit for bit, NaN payloads included."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.errors import CheckpointError
from echelon.mesh.runs import Patch

FILE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex32: "F16",
    torch.complex64: "F32",
    torch.complex128: "F64",
}
"""What safetensors calls them. Complex numbers are written as pairs (real, imaginary) in a last dimension of 2."""

FROM_FILE = {name: dtype for dtype, name in FILE_NAMES.items() if not dtype.is_complex}

NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in FILE_NAMES}
"""What the manifest calls them: torch's own names."""

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the same width, which every copy treats as bits."""

MAX_ELEMENTS = 1 << 60


def file_name(dtype: torch.dtype, what: str) -> str:
    """The type's name in a safetensors file; `what` names the tensor in the error."""
    try:
        return FILE_NAMES[dtype]
    except KeyError:
        raise CheckpointError(
            f"{what} has the type {dtype}, which no checkpoint holds",
            remedy="Convert it to one of " + ", ".join(sorted(NAMES)) + ".",
        ) from None


def file_shape(shape: tuple[int, ...], dtype: torch.dtype) -> list[int]:
    """The shape under which a tensor lies in a file."""
    return [*shape, 2] if dtype.is_complex else list(shape)


def width(dtype: torch.dtype) -> int:
    """Bytes of one number in a file: half an element for complex types."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers; complex tensors get a last dimension of 2. A view, never a copy, except of a lazy
    conjugate or negative, which has no memory of its own."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    return tensor.resolve_neg().view(_CARRIERS[tensor.element_size()])


def windows(tensor: Tensor, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """Views that together are elements [start, stop) of the flattened tensor, each with its place in that order.

    A contiguous tensor is one view; another is cut along its leading dimensions, so that nothing is ever copied.
    """
    if start >= stop:
        return
    if tensor.is_contiguous():
        yield start, tensor.view(-1)[start:stop]
        return
    if start == 0 and stop == tensor.numel():
        yield 0, tensor
        return
    row = math.prod(tensor.shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        at = last * row
        yield from _shifted(tensor[last], start - at, stop - at, at)
        return
    if start < first * row:
        at = (first - 1) * row
        yield from _shifted(tensor[first - 1], start - at, row, at)
    if first < last:
        yield first * row, tensor[first:last]
    if last * row < stop:
        yield from _shifted(tensor[last], 0, stop - last * row, last * row)


def lay(target: Tensor, source: Tensor, patches: Sequence[Patch], times: int = 1) -> None:
    """Copies from `source` (flat) into `target`, both as bits; the patches' own places are the source's. Each element is `times` numbers."""
    for patch in patches:
        count, length = patch.count, patch.length * times
        at, step = patch.at * times, patch.step * times
        to, to_step = patch.other_at * times, patch.other_step * times
        if count > 1 and target.is_contiguous():
            size = (count, length)
            rows = source.as_strided(size, (step, 1), source.storage_offset() + at)
            target.as_strided(size, (to_step, 1), target.storage_offset() + to).copy_(rows)
            continue
        for row in range(count):
            begin = to + row * to_step
            for where, view in windows(target, begin, begin + length):
                low = at + row * step + where - begin
                view.copy_(source[low : low + view.numel()].view(view.shape))


def _shifted(tensor: Tensor, start: int, stop: int, by: int) -> Iterator[tuple[int, Tensor]]:
    for at, view in windows(tensor, start, stop):
        yield at + by, view
