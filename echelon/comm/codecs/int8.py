"""int8: each block's largest element becomes ±127, the others the nearest whole number. Four times smaller than float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from echelon.comm.codecs.codec import as_bytes, blocks, from_bytes, num_blocks

STEPS = 127


class Int8:
    """A block with NaN or infinity in it has a scale that makes all of it NaN or infinite, whatever its whole numbers."""

    name = "int8"
    sparse = False

    def payload_bytes(self, numel: int) -> int:
        return 4 * num_blocks(numel) + numel

    def encode(self, x: Tensor) -> Tensor:
        cut = blocks(x)
        scale = (torch.linalg.vector_norm(cut, math.inf, 2) / STEPS).to(torch.float32)
        divisor = torch.where(scale == 0, 1.0, scale).to(x.dtype).unsqueeze(2)
        whole = (cut / divisor).round_().clamp_(-STEPS, STEPS).view(x.shape)
        payload = torch.empty(x.shape[0], self.payload_bytes(x.shape[1]), dtype=torch.uint8, device=x.device)
        at = 4 * num_blocks(x.shape[1])
        payload[:, :at] = as_bytes(scale)
        payload[:, at:].view(torch.int8).copy_(whole)
        return payload

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        at = 4 * num_blocks(numel)
        scale = from_bytes(payload[:, :at], torch.float32).to(dtype)
        out = blocks(from_bytes(payload[:, at:], torch.int8).to(dtype))
        return out.mul_(scale.unsqueeze(2)).view(-1, numel)
