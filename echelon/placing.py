"""What of each tensor this rank saves and reads back: the whole, a part that a form placed here, or nothing.

Forms that split the model say so in `Prepared.placed` (by a parameter's id), `placed_state` (where an optimizer's state lies
otherwise) and `placed_buffers` (by name). A tensor that none of them knows lies whole on every rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from echelon.checkpoint.handed import Handed
from echelon.checkpoint.holding import Holding
from echelon.checkpoint.load import Saved
from echelon.errors import CheckpointError
from echelon.mesh.layout import Key, Placed, Span
from echelon.parallel.local import local
from echelon.prepared import Prepared

Source = Saved | Handed
"""A checkpoint, or what another worker handed over."""


class Placing:
    """One a run and rank."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self._places: dict[tuple[str, str], tuple[Key, Span]] = {}
        """Keys and spans of the last checkpoint: the next one's are the same, and gathering it stops the script."""

    def of(self, param: Tensor) -> Placed | None:
        return self.prepared.placed.get(id(param))

    def of_state(self, param: Tensor) -> Placed | None:
        return self.prepared.placed_state.get(id(param)) or self.of(param)

    def of_buffer(self, name: str) -> Placed | None:
        return self.prepared.placed_buffers.get(name)

    def empty(self, placed: Placed | None) -> bool:
        """Is nothing of it here? A tensor without elements lies whole everywhere."""
        return placed is not None and not placed.runs and math.prod(placed.shape) > 0

    # -- saving --------------------------------------------------------------------------------------------------

    def hold(
        self,
        name: str,
        slot: str,
        tensor: Tensor,
        placed: Placed | None,
        settled: bool = True,
        own: bool = False,
    ) -> list[Holding]:
        """A parameter's value, its average or a buffer. `own`: what rank 0 alone has to save."""
        shape = tensor.shape
        tensor = local(tensor.detach() if tensor.requires_grad else tensor)
        if placed is None and tensor.shape != shape:
            raise CheckpointError(
                f"only {tuple(tensor.shape)} of {name} {tuple(shape)} is here, and nobody said which part"
            )
        if placed is None or not math.prod(placed.shape):
            key, span = self._place(name, slot, tuple(tensor.shape))
            everybody = tuple(range(self.prepared.seat[1]))
            return [Holding(key, tensor, span, everybody if settled and not own else (0,), settled)]
        if not placed.runs:
            return []
        copies = placed.copies if settled else (min(placed.copies),)
        if self.prepared.seat[0] not in copies:
            return []
        return [Holding(Key(name, slot), tensor, placed, copies, settled)]

    def hold_state(self, name: str, slot: str, tensor: Tensor, param: Tensor, own: bool) -> list[Holding]:
        """A tensor of an optimizer's state: shaped like what is here of its parameter, or a number of the whole of it, which those
        save that hold its first element."""
        placed = self.of_state(param)
        if placed is None or not math.prod(placed.shape) or not placed.runs:
            return self.hold(name, slot, tensor, placed, own=own)
        mine = local(tensor)
        if mine.dim() and mine.numel() == placed.numel:
            return self.hold(name, slot, tensor, placed)
        if mine.numel() > 1 and placed.numel != math.prod(placed.shape):
            raise CheckpointError(
                f"the optimizer keeps `{slot.partition('.')[2]}` of shape {tuple(mine.shape)} for {placed.numel} of the "
                f"{math.prod(placed.shape)} elements of `{name}`: what it says of the others cannot be known",
                remedy="Where parameters are split, use an optimizer whose state is shaped like them (SGD, Adam, …).",
            )
        if all(run.start for run in placed.runs):
            return []
        key, span = self._place(name, slot, tuple(mine.shape))
        return [Holding(key, mine, span, placed.copies)]

    def _place(self, name: str, slot: str, shape: tuple[int, ...]) -> tuple[Key, Span]:
        place = self._places.get((name, slot))
        if place is None or place[1].shape != shape:
            place = self._places[name, slot] = (Key(name, slot), Span.whole(shape))
        return place

    # -- restoring -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def read(self, saved: Source, key: Key, out: Tensor, placed: Placed | None) -> None:
        """Fills what is here of a tensor."""
        if not self.empty(placed):
            saved.read(key, local(out.detach()), placed)

    @torch.no_grad()
    def read_state(self, saved: Source, key: Key, param: Tensor, group: dict[str, Any], there: Any) -> Tensor:
        """A tensor of an optimizer's state, in its old memory if there is any. For parameters of which something is here."""
        shape, dtype, placed = saved.shape(key), saved.dtype(key), self.of_state(param)
        on_cpu = key.slot.endswith(".step") and not (group.get("capturable") or group.get("fused"))
        split = placed is not None and shape == tuple(placed.shape) and math.prod(shape) > 0 and shape != ()
        numel = placed.numel if placed is not None and split else math.prod(shape)
        out: Tensor
        if (
            isinstance(there, Tensor)
            and there.dtype == dtype
            and (local(there).numel() == numel if split else there.shape == shape)
        ):
            out = there
        elif (local(param).numel() == numel) if split else (shape == tuple(param.shape)):
            out = torch.empty_like(param, dtype=dtype)
        else:
            flat = (numel,) if split else shape
            out = torch.empty(flat, dtype=dtype, device="cpu" if on_cpu and not split else param.device)
        saved.read(key, local(out.detach()), placed if split else None)
        return out
