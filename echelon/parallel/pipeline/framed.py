"""A value on its way between two stages: a header that says what it is, and the value, in one message.

The receiver knows what must come (a Port, the micro-batch, the step) and compares: what is not that is an error with both
sides in it, never a wrong tensor. Nothing is unpickled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from echelon.errors import LoopError, UsageError
from echelon.parallel.pipeline.contract import Port

_MAGIC = 0x45434850495045  # "ECHPIPE"
_NUM_WORDS = 9  # before the shape
_ALIGN = 128
"""The value begins at a multiple of this: aligned for every type."""

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32,
    torch.uint32, torch.int64, torch.uint64, torch.bool, torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
"""A type's number on the wire is its place here: only ever add at the end."""
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


@dataclass(frozen=True)
class Label:
    """What a message is."""

    step: int
    """Anything that all ranks count alike and that no two steps under way share."""

    micro: int
    port: Port
    back: bool
    """The gradient, from target to source."""

    @cached_property
    def tag(self) -> int:
        """The same for what one stage gives another of one micro-batch: those go in the order of their values, and messages
        of one sender and tag come in order. Fits 31 bits."""
        return (
            (self.micro % 2**14) << 17 | self.port.source % 256 << 9 | self.port.target % 256 << 1 | self.back
        )

    @cached_property
    def num_bytes(self) -> int:
        return _begin(self.port) + math.prod(self.port.shape) * self.port.dtype.itemsize

    @cached_property
    def words(self) -> list[int]:
        p = self.port
        if p.dtype not in _CODES:
            raise UsageError(
                f"value {p.value} between stages {p.source} and {p.target} is {p.dtype}, which cannot travel",
                remedy="Cut the model elsewhere (--set cut=NAME), or convert the value.",
            )
        return [_MAGIC, self.step, self.micro, p.value, p.source, p.target, int(self.back), _CODES[p.dtype], len(p.shape), *p.shape]  # fmt: skip

    def __str__(self) -> str:
        return _told(self.words)


def pack(buffer: Tensor, label: Label, value: Tensor) -> None:
    """Writes the message into a flat uint8 tensor of `label.num_bytes` on the host."""
    port = label.port
    if tuple(value.shape) != port.shape or value.dtype != port.dtype:
        raise LoopError(
            f"stage {port.target if label.back else port.source} made {value.dtype} of shape {tuple(value.shape)} where its record says: {label}",
            remedy="The model did something else than when it was recorded: it must not depend on values or on chance in what it computes.",
        )
    words = label.words
    buffer[: 8 * len(words)].numpy()[:] = np.array(words, dtype=np.int64).view(np.uint8)
    _payload(buffer, port).copy_(value.detach())


def opened(buffer: Tensor, label: Label, sender: int, receiver: int) -> Tensor:
    """The value, in the message's own memory. LoopError when it is not what is expected."""
    expected = label.words
    found = buffer[: 8 * len(expected)].numpy().view(np.int64).tolist()
    if found != expected:
        came = _told(found) if found[0] == _MAGIC else "no message of a pipeline"
        raise LoopError(
            f"rank {receiver} of the pipe waits for {label}, and rank {sender} sent {came}",
            remedy="Do all ranks run the same script with the same data and strategy? Values that depend on the rank or on chance change what a model computes.",
        )
    return _payload(buffer, label.port)


def _begin(port: Port) -> int:
    return -(-8 * (_NUM_WORDS + len(port.shape)) // _ALIGN) * _ALIGN


def _payload(buffer: Tensor, port: Port) -> Tensor:
    return buffer[_begin(port) :].view(port.dtype).view(port.shape)


def _told(words: list[int]) -> str:
    """In words, whatever the numbers are: they may have come from somebody else."""
    _, step, micro, value, source, target, back, code, dims, *shape = words
    dtype = str(_DTYPES[code]).removeprefix("torch.") if 0 <= code < len(_DTYPES) else f"type {code}"
    way = f"stage {target} to {source}" if back else f"stage {source} to {target}"
    what = "the gradient of value" if back else "value"
    dims_there = f"{tuple(shape)}" if dims == len(shape) else f"of {dims} dimensions"
    return f"{what} {value} ({dtype} {dims_there}, {way}) of micro-batch {micro} in step {step}"
