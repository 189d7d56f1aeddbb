"""topk: the largest elements of every stretch of a row, with their places; the rest waits in the error feedback.

Stretches instead of the whole row: a place fits into two bytes, the choice runs in parallel, and no layer is starved by one
with larger gradients. A share of 0.01 sends 6 bytes for every 100 elements.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from echelon.comm.codecs.codec import as_bytes, from_bytes

STRETCH = 4096


class TopK:
    name = "topk"
    sparse = True

    def __init__(self, share: float) -> None:
        self.share = share

    def payload_bytes(self, numel: int) -> int:
        stretches, _, kept = self._cut(numel)
        return 6 * stretches * kept

    def encode(self, x: Tensor) -> Tensor:
        rows, numel = x.shape
        stretches, length, kept = self._cut(numel)
        cut = torch.nn.functional.pad(x, (0, stretches * length - numel)).view(rows, stretches, length)
        places = cut.abs().topk(kept, dim=2, sorted=False).indices
        places = places.sort(dim=2).values  # the order in which topk gives equal ones is nobody's promise
        values = cut.gather(2, places).to(torch.float32)
        return torch.cat([as_bytes(places.to(torch.int16)), as_bytes(values)], 1)

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        rows = payload.shape[0]
        stretches, length, kept = self._cut(numel)
        at = 2 * stretches * kept
        places = from_bytes(payload[:, :at], torch.int16).view(rows, stretches, kept).to(torch.int64)
        values = from_bytes(payload[:, at:], torch.float32).view(rows, stretches, kept).to(dtype)
        out = torch.zeros(rows, stretches, length, dtype=dtype, device=payload.device)
        return out.scatter_(2, places, values).view(rows, -1)[:, :numel].contiguous()

    def _cut(self, numel: int) -> tuple[int, int, int]:
        """(stretches of a row, elements of a stretch, elements kept of each)"""
        length = min(STRETCH, numel)
        return -(-numel // length), length, math.ceil(self.share * length)
