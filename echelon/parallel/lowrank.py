"""A bucket coded by PowerSGD: every large matrix of it as P Qᵀ of a small rank, all else exactly.

Two plain sums: of all P with what is not coded, then of all Q. Both are linear in the gradients, so the result is the
projection of the summed gradient on the columns of P, the same for any number of ranks but for rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.comm.codecs import lowrank
from echelon.comm.group import Group, Work
from echelon.parallel.buckets import Bucket, Slot
from echelon.parallel.carried import Piece
from echelon.parallel.residual import Residual
from echelon.parallel.rows import stretches_of


@dataclass(frozen=True)
class Matrix:
    """A gradient that is coded: where it lies in the bucket, and where its P and Q lie in their messages."""

    slot: Slot
    stretch: slice
    rows: int
    cols: int
    p: slice
    q: slice
    first: Tensor
    """Q at the very start."""

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.stretch].view(self.rows, self.cols)


class LowRankCoder:
    """See Coder."""

    def __init__(self, bucket: Bucket, live: Tensor, group: Group, rank: int) -> None:
        self.bucket, self.group, self.rank = bucket, group, rank
        self.stretches = stretches_of(bucket)
        self.own = Residual(live, self.stretches)
        self.matrices: list[Matrix] = []
        self.exact: list[slice] = []
        p_at = q_at = 0
        for slot in bucket.slots:
            found = lowrank.matrix_of(slot.param.shape, slot.param.stride(), rank)
            if found is None:
                self.exact.append(self.stretches[slot.index])
                continue
            rows, cols = found
            p, q = slice(p_at, p_at + rows * rank), slice(q_at, q_at + cols * rank)
            first = lowrank.start(slot.name, cols, rank, live)
            self.matrices.append(Matrix(slot, self.stretches[slot.index], rows, cols, p, q, first))
            p_at, q_at = p.stop, q.stop
        self.p_numel, self.q_numel = p_at, q_at
        exact = sum(stretch.stop - stretch.start for stretch in self.exact)
        self.message = live.new_empty(p_at + exact)
        firsts = [m.first.view(-1) for m in self.matrices]
        self.q = Residual(
            torch.cat(firsts) if firsts else live.new_zeros(0),
            {m.slot.index: m.q for m in self.matrices},
            in_gradient_units=False,
        )
        share = 2 * (group.size - 1)
        self.sent_bytes = share * (self.message.numel() + q_at) * live.element_size() // group.size
        self.plain_bytes = share * bucket.flat.nbytes // group.size

    @torch.no_grad()
    def meet(self) -> Iterator[Work]:
        """1. project: P = M Q of what is owed and came; summed over ranks, with what is not coded
        2. turn: P orthonormal; Q = Mᵀ P; what P Qᵀ leaves out is owed; Q summed over ranks
        3. unfold: P Qᵀ is the gradient, Q is where the next step starts
        """
        # project
        owed, message, q = self.own.changing(), self.message, self.q.changing()
        owed.add_(self.bucket.flat)
        for m in self.matrices:
            torch.mm(m.of(owed), q[m.q].view(m.cols, -1), out=message[m.p].view(m.rows, -1))
        at = self.p_numel
        for stretch in self.exact:
            message[at : at + stretch.stop - stretch.start] = owed[stretch]
            owed[stretch] = 0
            at += stretch.stop - stretch.start
        yield self.group.all_reduce(message)
        # turn
        flat, turned = self.bucket.flat, []
        at = self.p_numel
        for stretch in self.exact:
            flat[stretch].copy_(message[at : at + stretch.stop - stretch.start])
            at += stretch.stop - stretch.start
        for m in self.matrices:
            p = lowrank.orthonormal(message[m.p].view(m.rows, -1))
            mine = q[m.q].view(m.cols, -1)
            torch.mm(m.of(owed).t(), p, out=mine)
            m.of(owed).addmm_(p, mine.t(), alpha=-1.0)
            turned.append(p)
        if self.matrices:
            yield self.group.all_reduce(q)
        # unfold
        for m, p in zip(self.matrices, turned, strict=True):
            summed = q[m.q].view(m.cols, -1)
            m.of(flat).copy_(torch.mm(p, summed.t()))
            summed.copy_(lowrank.revived(summed, m.first))

    def residuals(self) -> list[Residual]:
        return [self.own, self.q]

    def owed(self, slot: Slot) -> Tensor:
        return self.own.live[self.stretches[slot.index]].clone()

    def pieces(self) -> Iterator[Piece]:
        for slot in self.bucket.slots:
            yield Piece.own(slot, self.own.live[self.stretches[slot.index]], self.group)
        for m in self.matrices:
            yield Piece.direction(m.slot, self.q.live[m.q].view(m.cols, -1), self.group)
