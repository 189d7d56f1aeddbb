"""fp16 and bf16: half the bytes of float32, a quarter of float64.

fp16 has 11 bits but a narrow range, so a row is first multiplied by a power of two that brings its largest element close to
fp16's own: nothing overflows, and what is too small is 2^-39 of the largest. bf16 has float32's range and 8 bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from echelon.comm.codecs.codec import as_bytes, from_bytes

TOP = 15
"""The largest element of a row is brought below 2^TOP; fp16 ends at 65504."""


class Float16:
    name = "fp16"
    sparse = False

    def payload_bytes(self, numel: int) -> int:
        return 4 + 2 * numel

    def encode(self, x: Tensor) -> Tensor:
        largest = torch.linalg.vector_norm(x, math.inf, 1, keepdim=True)
        exponent = torch.frexp(largest).exponent
        usable = torch.isfinite(largest) & (largest > 0)
        shift = torch.where(usable, TOP - exponent, 0).clamp(-126, 126).to(torch.int32)
        payload = torch.empty(x.shape[0], self.payload_bytes(x.shape[1]), dtype=torch.uint8, device=x.device)
        payload[:, :4] = as_bytes(shift)
        payload[:, 4:].view(torch.float16).copy_(x * _power(shift, x.dtype))
        return payload

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        shift = from_bytes(payload[:, :4], torch.int32)
        return from_bytes(payload[:, 4:], torch.float16).to(dtype).mul_(_power(-shift, dtype))


class BFloat16:
    name = "bf16"
    sparse = False

    def payload_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, x: Tensor) -> Tensor:
        return as_bytes(x.to(torch.bfloat16))

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return from_bytes(payload, torch.bfloat16).to(dtype)


def _power(shift: Tensor, dtype: torch.dtype) -> Tensor:
    """2^shift, exactly: as its bits."""
    if dtype is torch.float64:
        return ((shift.to(torch.int64) + 1023) << 52).view(dtype)
    return ((shift.to(torch.int32) + 127) << 23).view(dtype)
