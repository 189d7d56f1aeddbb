"""A plain safetensors file that several processes fill: what is in it, and what each writes of it, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from echelon.checkpoint import kinds, tensorfile
from echelon.errors import UsageError
from echelon.mesh.layout import Placed, Runs
from echelon.mesh.runs import cut
from echelon.parallel.local import local
from echelon.prepare import model as models

BLOCK_BYTES = 4 << 20
"""Beside the model itself, saving takes a few of these."""


@dataclass(frozen=True)
class Entry:
    """A tensor of the file. `tensor` is what of it this rank writes: the elements of `runs`, in this order."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    tensor: Tensor
    runs: tuple[Runs, ...] = ()


@dataclass(frozen=True)
class Block:
    """Bytes for the file: runs of `length` bytes from `at` on, each `period` after the one before."""

    at: int
    length: int
    period: int
    data: Any
    """A flat array of bytes; it belongs to whoever got the block until the next one is asked for."""


def entries(
    model: nn.Module,
    rank: int,
    placed: Mapping[int, Placed],
    buffers: Mapping[str, Placed],
    average: Mapping[int, Tensor],
) -> list[Entry]:
    """The model's state dict under the user's own names, tied weights under every name. Of what several ranks hold the lowest writes it;
    `average` has what is saved in place of a parameter, by its id."""
    found = []
    for key, value in models.unwrapped(model).state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue
        name = models.plain_name(key)
        lies = placed.get(id(value)) if isinstance(value, nn.Parameter) else buffers.get(name)
        mine = local(average.get(id(value), value).detach())
        if lies is None:
            if mine.shape != value.shape:
                raise UsageError(
                    f"only {tuple(mine.shape)} of {name} {tuple(value.shape)} is here, and nobody said which part"
                )
            lies = Placed(tuple(mine.shape), (Runs(0, mine.numel()),), (0,))
        writes = lies.runs and rank == min(lies.copies)
        found.append(Entry(name, value.dtype, tuple(lies.shape), mine, lies.runs if writes else ()))
    return sorted(found, key=lambda entry: (-entry.dtype.itemsize, entry.name))


class Table:
    """Where each entry lies; the same on every rank."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        rows = [(e.name, _kind(e), e.shape, _num_bytes(e)) for e in entries]
        self.header = tensorfile.header(rows)
        self.num_bytes = len(self.header) + sum(num_bytes for *_, num_bytes in rows)

    def blocks(self) -> Iterator[Block]:
        """What this rank writes."""
        at = len(self.header)
        for entry in self.entries:
            yield from _blocks(entry, at)
            at += _num_bytes(entry)


def _kind(entry: Entry) -> str:
    if entry.dtype is torch.complex64:
        return "C64"
    if entry.dtype in kinds.FILE_NAMES and not entry.dtype.is_complex:
        return kinds.FILE_NAMES[entry.dtype]
    raise UsageError(
        f"{entry.name} has the type {entry.dtype}, which a .safetensors file cannot hold",
        remedy="Save it with torch.save (a name that ends in .pt), or convert it.",
    )


def _num_bytes(entry: Entry) -> int:
    return int(np.prod(entry.shape, dtype=np.int64)) * entry.dtype.itemsize


def _blocks(entry: Entry, offset: int) -> Iterator[Block]:
    width = entry.dtype.itemsize
    bits, times = kinds.bits(entry.tensor), 2 if entry.dtype.is_complex else 1
    numel = sum(run.numel for run in entry.runs)
    step = BLOCK_BYTES // width
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        data = _gathered(bits, start * times, stop * times)
        for at, run in cut(entry.runs, start, stop):
            low = (at - start) * width
            part = data[low : low + run.numel * width]
            yield Block(offset + run.start * width, run.length * width, run.period * width, part)


def _gathered(bits: Tensor, start: int, stop: int) -> Any:
    """Elements [start, stop) as bytes in the host's memory: a view where they lie there already."""
    if bits.device.type == "cpu" and bits.is_contiguous():
        return bits.view(-1)[start:stop].numpy().view(np.uint8)
    out = torch.empty(stop - start, dtype=bits.dtype)
    for at, view in kinds.windows(bits, start, stop):
        out[at - start : at - start + view.numel()].view(view.shape).copy_(view)
    return out.numpy().view(np.uint8)
