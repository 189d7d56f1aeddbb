"""Placement: which elements of which tensor lie with which holder. Pure; every rank computes the same from the same input.

Tensors are flat. In their order, each goes to those who hold least for their share: a small one whole, a large one cut
among several at multiples of 64 bytes. So not only all tensors but every run of neighbouring ones is spread evenly, and
a bucket that leaves during backward loads all links at once. Optimizers that need whole tensors get whole ones.

A range's key is its number in the order of tensors and elements: what frames carry.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

from echelon.ps.shares import shares

ALIGN_BYTES = 64
"""Ranges begin at multiples of this, in their tensor and in their holder's memory: a cache line, whole vectors."""

PIECE_BYTES = 64 * 1024
"""A tensor is cut into pieces of at least about this much: less is not worth a message."""


@dataclass(frozen=True)
class Tensor:
    """What placement must know of a tensor."""

    name: str
    numel: int
    itemsize: int
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True, order=True)
class Holder:
    """Who holds: a server, or a worker that takes part in the summing."""

    role: Literal["server", "worker"]
    rank: int


@dataclass(frozen=True)
class Range:
    """Elements [begin, end) of a flat tensor."""

    key: int
    tensor: Tensor
    begin: int
    end: int
    holder: Holder
    offset_bytes: int
    """Where it begins in its holder's memory, when the holder's ranges lie there one behind the other."""

    @property
    def numel(self) -> int:
        return self.end - self.begin

    @property
    def nbytes(self) -> int:
        return self.numel * self.tensor.itemsize


@dataclass(frozen=True)
class Placement:
    """All ranges, by key. Every element of every tensor lies in exactly one."""

    tensors: tuple[Tensor, ...]
    holders: tuple[Holder, ...]
    ranges: tuple[Range, ...]

    def held_by(self, holder: Holder) -> tuple[Range, ...]:
        """In the order of keys, which is the order in its memory."""
        return self._by_holder.get(holder, ())

    def pieces(self, name: str) -> tuple[Range, ...]:
        """The ranges of a tensor, in order; none for one without elements. KeyError for an unknown name."""
        return self._by_name[name]

    def find(self, name: str, element: int) -> Range:
        """The range that holds this element; IndexError behind the end."""
        pieces = self.pieces(name)
        at = bisect_right([piece.begin for piece in pieces], element) - 1
        if at < 0 or element >= pieces[at].end:
            raise IndexError(f"{name} has no element {element}")
        return pieces[at]

    def nbytes(self, holder: Holder) -> int:
        return sum(r.nbytes for r in self.held_by(holder))

    def memory_bytes(self, holder: Holder) -> int:
        """What its ranges take up with their alignment."""
        held = self.held_by(holder)
        return held[-1].offset_bytes + _aligned(held[-1].nbytes) if held else 0

    @cached_property
    def digest(self) -> str:
        """Equal where placements are equal: both ends of a connection compare it before the first push."""
        told = [
            (r.tensor.name, r.tensor.dtype, r.tensor.numel, r.begin, r.end, r.holder.role, r.holder.rank)
            for r in self.ranges
        ]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    @cached_property
    def _by_holder(self) -> dict[Holder, tuple[Range, ...]]:
        found: dict[Holder, list[Range]] = {}
        for r in self.ranges:
            found.setdefault(r.holder, []).append(r)
        return {holder: tuple(held) for holder, held in found.items()}

    @cached_property
    def _by_name(self) -> dict[str, tuple[Range, ...]]:
        found: dict[str, list[Range]] = {t.name: [] for t in self.tensors}
        for r in self.ranges:
            found[r.tensor.name].append(r)
        return {name: tuple(pieces) for name, pieces in found.items()}


def place(
    tensors: Sequence[Tensor],
    num_servers: int,
    *,
    sharing_workers: int = 0,
    whole: bool = False,
    piece_bytes: int = PIECE_BYTES,
) -> Placement:
    """Servers hold everything; with `sharing_workers` (update=sync, apply=worker) the workers hold their share (shares.py).

    `tensors` come in the same order on every rank, best in that of the backward pass. `whole` never cuts one. Any number
    of servers: those for whom nothing is left hold nothing.
    """
    if len({t.name for t in tensors}) != len(tensors):
        raise ValueError("two tensors have one name: a range could not be told by it")
    if num_servers + sharing_workers < 1:
        raise ValueError("nobody to hold anything: there is neither a server nor a worker that shares")
    share = shares(sharing_workers, num_servers) if sharing_workers else None
    holders = [Holder("server", rank) for rank in range(num_servers)]
    weights = [share.server if share else 1] * num_servers
    if share:
        holders += [Holder("worker", rank) for rank in range(sharing_workers)]
        weights += [share.worker] * sharing_workers
    cuts = _place_whole(tensors, weights) if whole else _place_cut(tensors, weights, piece_bytes)
    ends = [0] * len(holders)
    ranges = []
    for key, (at, begin, end, who) in enumerate(sorted(cuts)):
        ranges.append(Range(key, tensors[at], begin, end, holders[who], ends[who]))
        ends[who] += _aligned(ranges[-1].nbytes)
    return Placement(tuple(tensors), tuple(holders), tuple(ranges))


Cut = tuple[int, int, int, int]
"""Number of the tensor, begin, end, number of the holder."""


def _place_whole(tensors: Sequence[Tensor], weights: Sequence[int]) -> list[Cut]:
    """The largest first, each to who will then hold least for its weight."""
    held = [0] * len(weights)
    able = [who for who, weight in enumerate(weights) if weight]
    cuts = []
    for at in sorted(range(len(tensors)), key=lambda at: (-tensors[at].nbytes, at)):
        size = tensors[at].nbytes
        who = min(able, key=lambda w: (Fraction(held[w] + size, weights[w]), w))
        held[who] += size
        if size:
            cuts.append((at, 0, tensors[at].numel, who))
    return cuts


def _place_cut(tensors: Sequence[Tensor], weights: Sequence[int], piece_bytes: int) -> list[Cut]:
    """Each tensor to those furthest behind their share of all that is placed so far, itself included. Small ones go on where the
    last went until that one is a quarter of a piece ahead: neighbours at one holder travel, and are summed, as one."""
    whole_weight, seen, last = sum(weights), 0, -1
    held = [0] * len(weights)
    cuts: list[Cut] = []
    for at, tensor in enumerate(tensors):
        seen += tensor.nbytes
        behind = [weight * seen - whole_weight * have for weight, have in zip(weights, held, strict=True)]
        owed = sorted((who for who, b in enumerate(behind) if b > 0), key=lambda who: (-behind[who], who))
        takers = sorted(owed[: max(1, tensor.nbytes // piece_bytes)])
        ahead = whole_weight * tensor.nbytes - behind[last] if last >= 0 else 0
        if last >= 0 and tensor.nbytes < piece_bytes and 4 * ahead <= whole_weight * piece_bytes:
            takers = [last]
        last = takers[-1] if takers else last
        for begin, end, who in _cut(tensor, takers, [max(1, behind[who]) for who in takers]):
            cuts.append((at, begin, end, who))
            held[who] += (end - begin) * tensor.itemsize
    return cuts


def _cut(tensor: Tensor, takers: Sequence[int], owed: Sequence[int]) -> list[tuple[int, int, int]]:
    """(begin, end, holder) in proportion to what is owed, cut at multiples of 64 bytes, none empty."""
    step = math.lcm(ALIGN_BYTES, tensor.itemsize) // tensor.itemsize
    pieces, begin, upto = [], 0, 0
    for who, amount in zip(takers, owed, strict=True):
        upto += amount
        end = tensor.numel if upto == sum(owed) else tensor.numel * upto // sum(owed) // step * step
        if end > begin:
            pieces.append((begin, end, who))
            begin = end
    return pieces


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def traffic(placement: Placement, num_workers: int) -> dict[Holder, int]:
    """Bytes that each host's link carries in one direction for one push and pull of everything, if each holder and each
    worker has a host of its own: what shares.py makes equal."""
    total = sum(t.nbytes for t in placement.tensors)
    loads: dict[Holder, int] = {}
    for rank in range(num_workers):
        own = placement.nbytes(Holder("worker", rank))
        loads[Holder("worker", rank)] = total - own + (num_workers - 1) * own
    for holder in placement.holders:
        if holder.role == "server":
            loads[holder] = num_workers * placement.nbytes(holder)
    return loads
