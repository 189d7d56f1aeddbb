"""Coded gradients: a Wire that sends fewer bytes and gives back later what coding left out (error feedback).

Only buckets of floating gradients are coded. The tail, sparse gradients and complex ones travel exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from echelon.coding import Compression
from echelon.comm.chain import Chain, Chains
from echelon.comm.codecs.named import codec_for
from echelon.comm.group import Group, Work
from echelon.parallel.buckets import Bucket, Rooms, Slot
from echelon.parallel.carried import Piece
from echelon.parallel.lowrank import LowRankCoder
from echelon.parallel.residual import Residual
from echelon.parallel.rows import RowCoder
from echelon.parallel.wire import Traffic, count


class Coder(Protocol):
    """How one bucket is coded, and what that left out so far."""

    bucket: Bucket
    own: Residual
    """What this rank's gradients still owe, in their order in the bucket."""
    sent_bytes: int
    plain_bytes: int

    def meet(self) -> Iterator[Work]:
        """bucket.flat becomes the sum over ranks, the same bits on all of them: see Chain."""
        ...

    def residuals(self) -> list[Residual]:
        """All that follows the step's transaction."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """… by slot, for checkpoints: views of what lives."""
        ...

    def owed(self, slot: Slot) -> Tensor:
        """All that this rank owes for a slot, added up: what it brings along to another bucket."""
        ...


class CodedWire:
    """See Wire; also a Keeper of the machine. Buffers: two residuals of the gradients' size and some of a bucket's size."""

    codes = True

    def __init__(self, group: Group, compression: Compression) -> None:
        self.group, self.compression = group, compression
        self.traffic = Traffic()
        self.rooms: Rooms = group
        self.chains = Chains()
        self.sent: list[tuple[Chain, Coder]] = []
        """Of the meeting that is open."""
        self.coders: list[Coder] = []
        self.aside: dict[int, tuple[Slot, Tensor]] = {}
        """What slots owe that are in no bucket now (frozen for long)."""

    # -- meeting -------------------------------------------------------------------------------------------------

    def send(self, bucket: Bucket) -> Work:
        coder = self._coder(bucket)
        if coder is None:
            count(self.traffic, bucket, self.group.size)
            return self.group.all_reduce(bucket.flat)
        self.traffic.sent_bytes += coder.sent_bytes
        self.traffic.plain_bytes += coder.plain_bytes
        with torch.no_grad():
            chain = self.chains.begin(coder.meet())
        self.sent.append((chain, coder))
        return chain

    def forget(self) -> None:
        """What was sent and not met is given up, and what it left out with it."""
        self.chains.forget()
        sent, self.sent = self.sent, []
        for chain, coder in sent:
            if chain.outcome is None:
                for residual in coder.residuals():
                    residual.withdraw(coder.bucket.slots)

    # -- building ------------------------------------------------------------------------------------------------

    def build(self, buckets: Sequence[Bucket]) -> None:
        """What was owed in the buckets of before goes along with its slots. No rank asks another for that: the sum over
        ranks of what is owed is all that matters."""
        for coder in self.coders:
            for slot in coder.bucket.slots:
                self.aside[slot.index] = (slot, coder.owed(slot))
        self.coders = []
        for bucket in buckets:
            self._coder(bucket)

    def _coder(self, bucket: Bucket) -> Coder | None:
        found = next((coder for coder in self.coders if coder.bucket is bucket), None)
        if found is None and bucket.slots and bucket.flat.is_floating_point():
            live = torch.zeros(
                bucket.flat.numel(), dtype=work_dtype(bucket.flat.dtype), device=bucket.flat.device
            )
            at = 0
            for slot in bucket.slots:
                if slot.index in self.aside:
                    live[at : at + slot.param.numel()] = self.aside.pop(slot.index)[1]
                at += slot.param.numel()
            found = self._make(bucket, live)
            self.coders.append(found)
        return found

    def _make(self, bucket: Bucket, live: Tensor) -> Coder:
        if self.compression.name == "powersgd":
            return LowRankCoder(bucket, live, self.group, int(self.compression.number))
        return RowCoder(bucket, live, self.group, codec_for(self.compression))

    # -- the step's transaction ----------------------------------------------------------------------------------

    def _residuals(self) -> Iterator[Residual]:
        for coder in self.coders:
            yield from coder.residuals()

    @torch.no_grad()
    def applied(self, slots: Sequence[Slot]) -> None:
        for residual in self._residuals():
            residual.applied(slots)

    @torch.no_grad()
    def withdraw(self, slots: Sequence[Slot]) -> None:
        for residual in self._residuals():
            residual.withdraw(slots)

    @torch.no_grad()
    def rescale(self, factor: Tensor) -> None:
        for residual in self._residuals():
            residual.rescale(factor)
        for _, owed in self.aside.values():
            owed.mul_(factor)

    def keep(self) -> None:
        for residual in self._residuals():
            residual.keep()

    def put_back(self) -> None:
        for residual in self._residuals():
            residual.put_back()

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[Piece]:
        for coder in self.coders:
            yield from coder.pieces()
        for slot, owed in self.aside.values():
            yield Piece.own(slot, owed, self.group)


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums and residuals are kept in float32, those of float64 gradients in float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32
