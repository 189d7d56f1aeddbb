"""Codec: a row of numbers as fewer bytes, and back. The contract, and what block codecs share."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

BLOCK = 512
"""Elements that share one scale: smaller errs less, larger sends less."""


class Codec(Protocol):
    """Pure functions of tensors, on any device. Nothing is remembered: what coding lost is the caller's to keep.

    Rows have one length, 1 to BLOCK elements or a multiple of BLOCK, and type float32 or float64. A row's payload has
    always the same number of bytes, so that ranks need not tell each other lengths. Whoever decodes the same bytes
    gets the same bits: decoding is a copy, a look-up, or one rounded product an element. NaN and infinity come out as
    NaN or infinity, at least in the block in which they went in.
    """

    name: str

    sparse: bool
    """Leaves most elements out: to code a sum of such rows again would hold back most of what was sent."""

    def payload_bytes(self, numel: int) -> int:
        """Bytes of a coded row of this many elements."""
        ...

    def encode(self, x: Tensor) -> Tensor:
        """[rows, numel] -> uint8 [rows, payload_bytes(numel)]; x is left as it was."""
        ...

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """The rows that `payload` stands for, as a fresh [rows, numel]."""
        ...


def padded(numel: int) -> int:
    """The length of a row that holds this many elements."""
    return numel if numel <= BLOCK else -(-numel // BLOCK) * BLOCK


def blocks(x: Tensor) -> Tensor:
    """[rows, numel] -> [rows, blocks, elements of a block], a view."""
    return x.view(x.shape[0], -1, min(BLOCK, x.shape[1]))


def num_blocks(numel: int) -> int:
    return max(1, numel // BLOCK)


def as_bytes(x: Tensor) -> Tensor:
    """[rows, …] of any type -> uint8 [rows, bytes]."""
    return x.contiguous().view(torch.uint8).view(x.shape[0], -1)


def from_bytes(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [rows, bytes] -> [rows, elements], a view where it may be one."""
    payload = payload.contiguous()
    if payload.storage_offset() % dtype.itemsize:
        payload = payload.clone()
    return payload.view(-1).view(dtype).view(payload.shape[0], -1)
