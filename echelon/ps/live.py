"""A Group of the workers that are still there, for those that are not at one place: they meet on the first server."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echelon.comm import plain
from echelon.comm.group import Done, Lost, Op, Work
from echelon.errors import LinkLost, PeerLost, UsageError
from echelon.ps.desk import Desk
from echelon.ps.worker import lost


class LiveGroup:
    """A Group of the workers that are still there: they meet on the first server. `size` stays what it was; whoever is gone counts
    for nothing in a reduction, and its row of a gathering is zero. For small values, outside of the steps."""

    local = False
    sent_bytes = 0.0  # its messages are counted where they leave: by the link to the server

    def __init__(self, desk: Desk, number: int, rank: int, size: int) -> None:
        self.desk, self.number, self.rank, self.size = desk, number, rank, size
        self._count = 0

    @property
    def live(self) -> tuple[int, ...]:
        """Who took part in the last meeting, less those that were gone when an epoch ended since."""
        return self.desk.live or tuple(range(self.size))

    def buffer(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def _meet(self, x: Tensor) -> list[Tensor] | Lost:
        """What everybody who is there brought, in the order of ranks."""
        self._count += 1
        head = {"group": self.number, "number": self._count}
        flat = x.detach().reshape(-1).cpu()
        data = (flat if flat.numel() else torch.zeros(1)).contiguous().view(torch.uint8).clone()
        try:
            reply = self.desk.ask("deal.meet", head, data, what="the other workers")
        except (LinkLost, PeerLost) as error:
            return lost(error)
        self.desk.live = tuple(int(rank) for rank in reply.head["ranks"])
        self.desk.meeting = {**head, "ranks": list(self.live)}, reply.tensors[0]
        rows = reply.tensors[0].view(torch.uint8).reshape(len(self.live), -1)
        if not flat.numel():
            return [torch.empty_like(flat) for _ in self.live]
        return [row.clone().view(flat.dtype) for row in rows]

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        found = self._meet(x)
        if isinstance(found, Lost):
            return Done(found)
        x.copy_(plain.reduced(found, op).reshape(x.shape))
        return Done()

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        found = self._meet(x)
        if isinstance(found, Lost):
            return Done(found)
        out.zero_()
        for rank, row in zip(self.live, found, strict=True):
            out[rank].copy_(row.reshape(x.shape))
        return Done()

    def broadcast(self, x: Tensor, root: int = 0) -> Work:
        found = self._meet(x)
        if isinstance(found, Lost):
            return Done(found)
        if root not in self.live:
            return Done(Lost((root,), f"worker {root} is gone"))
        x.copy_(found[self.live.index(root)].reshape(x.shape))
        return Done()

    def barrier(self) -> Work:
        found = self._meet(torch.zeros(1))
        return Done(found if isinstance(found, Lost) else None)

    def _not_here(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError("workers that take batches by themselves meet only to reduce, gather and wait")

    reduce_scatter = reduce = gather = scatter = all_to_all = send = recv = _not_here

    def abort(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass
