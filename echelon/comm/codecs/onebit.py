"""1bit: the sign of each element, times the mean magnitude of its block. About thirty times smaller than float32."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.comm.codecs.codec import as_bytes, blocks, from_bytes, num_blocks

GATHERS = 0x0102040810204080


class OneBit:
    name = "1bit"
    sparse = False

    def payload_bytes(self, numel: int) -> int:
        return 4 * num_blocks(numel) + _eighth(numel)

    def encode(self, x: Tensor) -> Tensor:
        scale = blocks(x).abs().mean(2).to(torch.float32)
        return torch.cat([as_bytes(scale), _packed(x >= 0)], 1)

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        at = 4 * num_blocks(numel)
        scale = from_bytes(payload[:, :at], torch.float32).to(dtype).unsqueeze(2)
        positive = blocks(_unpacked(payload[:, at:], numel))
        return torch.where(positive, scale, -scale).view(-1, numel)


def _eighth(numel: int) -> int:
    return -(-numel // 8)


def _packed(bits: Tensor) -> Tensor:
    """bool [rows, n] -> uint8 [rows, n / 8]. One product gathers the lowest bits of eight bytes in the highest byte."""
    ones = torch.nn.functional.pad(bits.view(torch.uint8), (0, -bits.shape[1] % 8))
    return ((ones.view(torch.int64) * GATHERS) >> 56).to(torch.uint8)


def _unpacked(packed: Tensor, numel: int) -> Tensor:
    """The bits again: each byte stands for the eight that it was packed from."""
    every, places = torch.arange(256, device=packed.device), torch.arange(8, device=packed.device)
    table = ((every.unsqueeze(1) >> places) & 1).to(torch.uint8).view(torch.int64).view(-1)
    bits = table[packed.to(torch.int64)].view(torch.uint8)
    return bits[:, :numel].contiguous().view(torch.bool)
