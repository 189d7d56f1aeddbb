"""Flat buckets: where gradients lie when they meet. Packing is pure; memory comes from the group, or from who carries them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from echelon.comm.group import Work
from echelon.comm.handover import NO_MEMORY
from echelon.errors import WorldError

MIB = 1 << 20
ONE_MESSAGE_BYTES = 8 * MIB
ALIGN = 64
"""Bytes: every gradient starts on a cache line."""


class Slot:
    """One parameter's place in a bucket and what it holds between micro-steps."""

    __slots__ = ("bucket", "counted", "fired", "idle", "index", "late", "name", "param", "pending", "sealed", "sparse",
                 "stacked", "view")  # fmt: skip

    def __init__(self, index: int, name: str, param: nn.Parameter, sparse: bool) -> None:
        self.index, self.name, self.param, self.sparse = index, name, param, sparse
        self.bucket: Bucket | None = None
        self.view: Tensor | None = None
        self.idle = 0
        """Steps for which the parameter has been frozen."""
        self.fired = False
        """A gradient came in the meeting that is open."""
        self.counted = False
        """… and counts: it was not a stand-in's, or the group held some from before."""
        self.stacked = False
        """… on top of an earlier backward's global one, inside a group."""
        self.late: Tensor | None = None
        """A gradient that came after the bucket had left (reentrant checkpointing): met in a second round."""
        self.pending: Tensor | None = None
        """The weighted gradient of earlier micro-steps of the group, still provisional."""
        self.sealed: Tensor | None = None
        """… and what the script already stepped on: zero_grad does not take it back."""

    def bank(self, grad: Tensor, weight: float) -> None:
        """Adds a gradient times its weight to what the group holds here, in one pass. Takes the tensor over if it is not the slot's view."""
        if self.pending is not None:
            self.pending.add_(grad, alpha=weight)
        elif self.lies_in(grad):
            self.pending = grad.mul(weight)
        else:
            self.pending = grad if weight == 1.0 else grad.mul_(weight)

    def lies_in(self, grad: Tensor) -> bool:
        """Is this gradient the slot's own view?"""
        view = self.view
        return view is not None and grad.layout is torch.strided and grad.data_ptr() == view.data_ptr()

    def seal(self) -> None:
        if self.pending is not None:
            self.sealed = self.pending if self.sealed is None else self.sealed.add_(self.pending)
            self.pending = None

    def held(self) -> Tensor | None:
        """All that earlier micro-steps of the group left here; the slot forgets it."""
        self.seal()
        held, self.sealed = self.sealed, None
        return held


@dataclass(eq=False)
class Bucket:
    """Slots whose gradients travel in one message; the last bucket of a model carries the tail."""

    slots: list[Slot]
    flat: Tensor
    tail: Tensor | None = None
    missing: int = 0
    work: Work | None = None
    again: bool = False
    """Some slot got a gradient after the bucket had left."""
    index: int = field(default=0)


class Rooms(Protocol):
    """Where the memory of buckets comes from: a Group, or ps/shared.py."""

    rank: int

    def buffer(self, nbytes: int) -> Tensor:
        """See Group.buffer."""


def pack(sizes: Sequence[int], first_bytes: int, bucket_bytes: int) -> list[list[int]]:
    """Consecutive items whose bytes reach the limit, the first limit being smaller. Every item is in one bucket.

    Few bytes make one message: what a message costs is then more than starting early would hide.
    """
    if sum(sizes) <= min(ONE_MESSAGE_BYTES, bucket_bytes):
        return [list(range(len(sizes)))] if sizes else []
    buckets: list[list[int]] = [[]]
    held = 0
    for index, size in enumerate(sizes):
        limit = first_bytes if len(buckets) == 1 else bucket_bytes
        if buckets[-1] and held + size > limit:
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += size
    return [b for b in buckets if b]


def build(
    slots: Sequence[Slot],
    rooms: Rooms,
    *,
    first_bytes: int,
    bucket_bytes: int,
    tail_numel: int,
    coded: bool = False,
) -> tuple[list[Bucket], Tensor]:
    """Buckets over `slots` in this order (dense ones only), and the tail, which rides in the last bucket if its type
    can carry counts and it is not coded, else in a bucket of its own."""
    dense = [s for s in slots if not s.sparse]
    buckets: list[Bucket] = []
    for _, same in _by_type(dense):
        sizes = [s.param.numel() * s.param.element_size() for s in same]
        for chosen in pack(sizes, first_bytes if not buckets else bucket_bytes, bucket_bytes):
            buckets.append(_lay([same[i] for i in chosen], rooms, coded=coded))
    if not coded and buckets and buckets[-1].flat.dtype in (torch.float32, torch.float64):
        buckets[-1] = _lay(buckets[-1].slots, rooms, tail_numel)
    else:
        flat = _room(rooms, 4 * tail_numel).view(torch.float32)
        buckets.append(Bucket([], flat, tail=flat))
    for index, bucket in enumerate(buckets):
        bucket.index = index
    tail = buckets[-1].tail
    assert tail is not None
    return buckets, tail


def lay(slots: Sequence[Slot], rooms: Rooms, coded: bool = False) -> list[Bucket]:
    """One bucket a type, with no tail."""
    return [_lay(same, rooms, coded=coded) for _, same in _by_type(slots)]


def _by_type(slots: Sequence[Slot]) -> list[tuple[torch.dtype, list[Slot]]]:
    """Slots of each dtype, the most common one last, so that it carries the tail."""
    kinds: dict[torch.dtype, list[Slot]] = {}
    for slot in slots:
        kinds.setdefault(slot.param.dtype, []).append(slot)
    carries = (torch.float32, torch.float64)
    return sorted(kinds.items(), key=lambda item: (item[0] in carries, len(item[1])))


def _lay(slots: list[Slot], rooms: Rooms, tail_numel: int = 0, coded: bool = False) -> Bucket:
    """Gives every slot its view into one flat buffer; coded ones have no gaps, since a code would fill them."""
    dtype, itemsize = slots[0].param.dtype, slots[0].param.element_size()
    step = 1 if coded else ALIGN // itemsize
    starts, at = [], 0
    for slot in slots:
        starts.append(at)
        at += -(-slot.param.numel() // step) * step
    flat = _room(rooms, (at + tail_numel) * itemsize).view(dtype)
    bucket = Bucket(slots, flat, tail=flat[at:] if tail_numel else None)
    for slot, start in zip(slots, starts, strict=True):
        param = slot.param
        slot.bucket = bucket
        old, slot.view = slot.view, _like(flat[start : start + param.numel()], param)
        if (
            old is not None and param.grad is old
        ):  # moved at once: old and new messages are never there whole at one time
            param.grad = slot.view.copy_(old)
    return bucket


def _room(rooms: Rooms, nbytes: int) -> Tensor:
    try:
        return rooms.buffer(nbytes)
    except OSError as error:
        raise WorldError(
            f"rank {rooms.rank} has no room for {nbytes} bytes of gradients: {error}", remedy=NO_MEMORY
        ) from None


def _like(flat: Tensor, param: Tensor) -> Tensor:
    """A view of the flat piece with the parameter's shape, and its strides if they are dense (channels_last)."""
    if param.is_contiguous() or not _dense(param):
        return flat.view(param.shape)
    return flat.as_strided(param.shape, param.stride(), flat.storage_offset())


def _dense(param: Tensor) -> bool:
    order = sorted(range(param.dim()), key=lambda d: param.stride(d))
    expected = 1
    for dim in order:
        if param.shape[dim] != 1 and param.stride(dim) != expected:
            return False
        expected *= param.shape[dim]
    return True
