"""A run's state as one piece of memory, handed from a worker that has it to one that was started again.

It is read like a checkpoint (load.Saved), and lies nowhere: it travels through a Group. The piece begins with the length of a head
in JSON, which says where each tensor lies in the bytes behind it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.checkpoint import kinds, objects
from echelon.checkpoint.holding import Holding, check_inside
from echelon.errors import CheckpointError
from echelon.mesh.layout import Key, Placed, Span

LENGTH_BYTES = 8
ALIGN = 16


def packed(step: int, world_size: int, holdings: Sequence[Holding], tree: Any) -> Tensor:
    """Everything in one flat uint8 tensor on the CPU, copied. CheckpointError for what cannot travel."""
    text, loose = objects.encode(tree)
    rows: list[list[Any]] = []
    pieces: list[Tensor] = []
    at = 0
    named = [(holding.key.name, holding.key.slot, holding.tensor) for holding in holdings]
    for holding in holdings:
        if isinstance(holding.span, Placed) and holding.span.numel != math.prod(holding.span.shape):
            raise CheckpointError(
                f"only a part of {holding.key.name} ({holding.key.slot}) is here to be handed over"
            )
    for name, slot, tensor in [*named, *((str(i), None, x) for i, x in enumerate(loose))]:
        kinds.file_name(tensor.dtype, f"{name} ({slot})")
        bits = kinds.bits(tensor.cpu()).contiguous().view(-1).view(torch.uint8)
        rows.append([name, slot, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), at])
        pieces.append(bits)
        at += -(-len(bits) // ALIGN) * ALIGN
    head = json.dumps({"step": step, "world_size": world_size, "text": len(text), "tensors": rows}).encode()
    begin = LENGTH_BYTES + len(head) + len(text)
    begin += -begin % ALIGN
    whole = torch.zeros(begin + at, dtype=torch.uint8)
    start = len(head).to_bytes(LENGTH_BYTES, "big") + head + text
    whole[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
    for row, bits in zip(rows, pieces, strict=True):
        whole[begin + row[4] : begin + row[4] + len(bits)] = bits
    return whole


class Handed:
    """What was packed(), on the other side. Reading fills tensors of the caller's and never blocks."""

    path = "another worker"

    def __init__(self, whole: Tensor) -> None:
        try:
            self._open(whole)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise CheckpointError(
                f"the state that another worker handed over makes no sense: {type(error).__name__} {error}"
            ) from None

    def _open(self, whole: Tensor) -> None:
        length = int.from_bytes(bytes(whole[:LENGTH_BYTES].tolist()), "big")
        head = json.loads(whole[LENGTH_BYTES : LENGTH_BYTES + length].numpy().tobytes())
        self.step, self.world_size = int(head["step"]), int(head["world_size"])
        at = LENGTH_BYTES + length
        self._text = whole[at : at + int(head["text"])].numpy().tobytes()
        at += int(head["text"])
        at += -at % ALIGN
        self._tensors: dict[Key, Tensor] = {}
        self._loose: list[Tensor] = []
        for name, slot, kind, shape, start in head["tensors"]:
            dtype = kinds.NAMES[kind]
            num_bytes = math.prod(shape) * dtype.itemsize
            raw = whole[at + start : at + start + num_bytes]
            if len(raw) != num_bytes:
                raise ValueError(f"{name} is cut off")
            tensor = raw.view(dtype).view(shape)
            if slot is None:
                self._loose.append(tensor)
            else:
                self._tensors[Key(name, slot)] = tensor

    def keys(self) -> list[Key]:
        return list(self._tensors)

    def shape(self, key: Key) -> tuple[int, ...]:
        return tuple(self._tensors[key].shape)

    def dtype(self, key: Key) -> torch.dtype:
        return self._tensors[key].dtype

    def read(self, key: Key, out: Tensor, span: Span | Placed | None = None) -> None:
        """Fills `out` with the elements of `span`, or with the whole tensor."""
        held = self._tensors[key]
        if span is not None:
            check_inside(f"{key.name} ({key.slot})", out.numel(), span, "cannot take")
            flat = held.reshape(-1)
            rows = [((r.count, r.length), (r.period, 1), flat.storage_offset() + r.start) for r in span.runs]
            held = torch.cat([flat.as_strided(*row).reshape(-1) for row in rows] or [flat[:0]])
        if held.numel() != out.numel() or held.dtype != out.dtype:
            raise CheckpointError(
                f"{key.name} ({key.slot}) is {held.numel()} of {held.dtype} on another worker, and {out.numel()} of {out.dtype} here",
                remedy="All workers build the same model, one that is started again too.",
            )
        out.copy_(held.view(out.shape))

    def ranks(self) -> list[int]:
        return [0]

    def objects(self, rank: int) -> Any:
        """The tree; every rank gets that of the worker that handed it over."""
        return objects.decode(self._text, lambda number: self._loose[number].clone(), self.path)
