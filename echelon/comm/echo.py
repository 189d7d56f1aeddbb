"""A stand-in for a group whose other ranks are not to be disturbed: every one of them is taken to have what this one has.

A worker that was started again runs the script from its top while the others wait: what they did long ago (first weights,
checks that all call the same) must neither hang nor disturb them. What comes out counts for nothing: it is replaced when
the worker has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.comm.group import Done, Op, Outcome, Receipt, Work


class EchoGroup:
    """See Group. Every operation is over when it begins, and has met; or was lost, if `outcome` says so."""

    local = False
    sent_bytes = 0.0

    def __init__(self, rank: int, size: int, device: torch.device, outcome: Outcome | None = None) -> None:
        self.rank, self.size, self.device, self.outcome = rank, size, device, outcome

    def buffer(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        if op == "sum" and x.dtype is not torch.bool:
            x.mul_(self.size)
        elif op == "prod" and x.dtype is not torch.bool:
            x.pow_(self.size)
        elif op == "xor" and self.size % 2 == 0:
            x.zero_()
        return Done(self.outcome)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> Work:
        out.copy_(x[self.rank])
        return self.all_reduce(out, op)

    def reduce(self, x: Tensor, root: int = 0, op: Op = "sum") -> Work:
        return self.all_reduce(x, op) if root == self.rank else Done(self.outcome)

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        out.copy_(x.expand(out.shape))
        return Done(self.outcome)

    def gather(self, out: Tensor | None, x: Tensor, root: int = 0) -> Work:
        return Done(self.outcome) if out is None else self.all_gather(out, x)

    def scatter(self, out: Tensor, x: Tensor | None, root: int = 0) -> Work:
        if x is not None:
            out.copy_(x[self.rank])
        return Done(self.outcome)

    def all_to_all(self, out: Tensor, x: Tensor, out_counts: Sequence[int], counts: Sequence[int]) -> Work:
        mine = x.split(list(counts))[self.rank]
        for piece in out.split(list(out_counts)):
            length = min(len(piece), len(mine))
            piece[:length] = mine[:length]
        return Done(self.outcome)

    def broadcast(self, x: Tensor, root: int = 0) -> Work:
        return Done(self.outcome)

    def send(self, x: Tensor, peer: int, tag: int = 0) -> Work:
        return Done(self.outcome)

    def recv(self, x: Tensor, peer: int | None, tag: int = 0) -> Receipt:
        done = Done(self.outcome)
        done.source = peer
        return done

    def barrier(self) -> Work:
        return Done(self.outcome)

    def abort(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


def open_torch(rank: int, size: int) -> None:
    """torch.distributed's default group as one whose other ranks are not there either, unless there is one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
