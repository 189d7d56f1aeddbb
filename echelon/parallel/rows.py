"""A bucket coded as rows: fp16, bf16, int8, 1bit, topk.

The sum is taken in rank order in float32 (float64), by one rank for each element (scatter) or by each alike from the same
bytes (gather), so every rank has the same bits. A rank that codes goes on from what the others will decode, and owes the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from echelon.comm.codecs.codec import Codec
from echelon.comm.codecs.plan import plan
from echelon.comm.group import Group, Work
from echelon.parallel.buckets import Bucket, Slot
from echelon.parallel.carried import Piece
from echelon.parallel.residual import Residual


class RowCoder:
    """See Coder. `live` is what is owed already, one element for each of the bucket."""

    def __init__(self, bucket: Bucket, live: Tensor, group: Group, codec: Codec) -> None:
        self.bucket, self.group, self.codec = bucket, group, codec
        self.numel = bucket.flat.numel()
        self.plan = plan(self.numel, bucket.flat.element_size(), group.size, codec)
        self.sent_bytes, self.plain_bytes = self.plan.sent_bytes, self.plan.plain_bytes
        self.stretches = stretches_of(bucket)
        rows = group.size if self.plan.form == "scatter" else 1
        room = live.new_zeros(rows * self.plan.numel)
        room[: self.numel] = live
        self.own = Residual(room, self.stretches)
        self.sums: Residual | None = None
        """What the sum of my slice owes; only where sums are coded."""
        if self.plan.form == "scatter":
            self.at = min(group.rank * self.plan.numel, self.numel)
            self.end = min(self.at + self.plan.numel, self.numel)
            cut = {i: self._within(stretch) for i, stretch in self.stretches.items()}
            self.sums = Residual(
                live.new_zeros(self.plan.numel), {i: s for i, s in cut.items() if s.stop > s.start}
            )

    def _within(self, stretch: slice) -> slice:
        """A stretch of the bucket, as far as it lies in my slice, from the slice's start."""
        start, stop = max(stretch.start, self.at), min(stretch.stop, self.end)
        return slice(start - self.at, max(start, stop) - self.at)

    # -- meeting -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def meet(self) -> Iterator[Work]:
        """1. code: what is owed and what came, cut into rows; what the code leaves out is owed from now on
        2. meet: as the plan says
        """
        flat, owed = self.bucket.flat, self.own.changing()
        if self.plan.form == "exact":
            flat.add_(owed[: self.numel])
            owed.zero_()
            yield self.group.all_reduce(flat)
            return
        # code
        owed[: self.numel].add_(flat)
        payload = self._code(owed.view(-1, self.plan.numel))
        owed[self.numel :] = 0
        # meet
        yield from self._scatter(payload) if self.sums is not None else self._gather(payload)

    def _code(self, rows: Tensor) -> Tensor:
        """The rows' payload; they keep what it leaves out."""
        payload = self.codec.encode(rows)
        rows.sub_(self.codec.decode(payload, self.plan.numel, rows.dtype))
        return payload

    def _gather(self, payload: Tensor) -> Iterator[Work]:
        every = payload.new_empty(self.group.size, payload.shape[1])
        yield self.group.all_gather(every, payload[0])
        total = self._decoded(every[:1])
        for rank in range(1, self.group.size):
            total.add_(self._decoded(every[rank : rank + 1]))
        self.bucket.flat.copy_(total.view(-1)[: self.numel])

    def _scatter(self, payload: Tensor) -> Iterator[Work]:
        assert self.sums is not None
        size, width = payload.shape
        mine, counts = torch.empty_like(payload), [width] * size
        yield self.group.all_to_all(mine.view(-1), payload.view(-1), counts, counts)
        total = self.sums.changing()
        for rank in range(size):
            total.add_(self._decoded(mine[rank : rank + 1]).view(-1))
        coded = self._code(total.view(1, -1))
        total[self.end - self.at :] = 0
        every = torch.empty_like(payload)
        yield self.group.all_gather(every, coded[0])
        self.bucket.flat.copy_(self._decoded(every).view(-1)[: self.numel])

    def _decoded(self, payload: Tensor) -> Tensor:
        return self.codec.decode(payload, self.plan.numel, self.own.live.dtype)

    # -- what is owed --------------------------------------------------------------------------------------------

    def residuals(self) -> list[Residual]:
        return [self.own] if self.sums is None else [self.own, self.sums]

    def owed(self, slot: Slot) -> Tensor:
        owed = self.own.live[self.stretches[slot.index]].clone()
        if self.sums is not None and slot.index in self.sums.stretches:
            inside = self.sums.stretches[slot.index]
            at = self.at + inside.start - self.stretches[slot.index].start
            owed[at : at + inside.stop - inside.start] += self.sums.live[inside]
        return owed

    def pieces(self) -> Iterator[Piece]:
        for slot in self.bucket.slots:
            stretch = self.stretches[slot.index]
            yield Piece.own(slot, self.own.live[stretch], self.group, self.sums is not None)
            if self.sums is not None and slot.index in self.sums.stretches:
                inside = self.sums.stretches[slot.index]
                start = self.at + inside.start - stretch.start
                yield Piece.of_sum(slot, self.sums.live[inside], start, self.group)


def stretches_of(bucket: Bucket) -> dict[int, slice]:
    """Where each slot lies in a bucket without gaps."""
    found, at = {}, 0
    for slot in bucket.slots:
        found[slot.index] = slice(at, at + slot.param.numel())
        at += slot.param.numel()
    return found
