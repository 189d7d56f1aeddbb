"""A Group over a torch.distributed process group: gloo on CPU, NCCL on CUDA.

What torch raises when a peer is gone (gloo: about 20 ms after a death on the same host) or when its time is over
becomes Lost here, and stays: a gloo group that failed once is of no further use.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from echelon import activity
from echelon.clock import Deadline
from echelon.comm.group import Done, Lost, Met, Op, Outcome, Work

Blame = Callable[[str], tuple[int, ...]]
"""Asks the roster which peers are gone, given what torch said."""

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
OP_LIMIT_S = 1800.0
"""An operation never waits longer, whoever waits; deaths are told much earlier by the supervisor."""


class TorchWork:
    """One operation of a TorchGroup. On CUDA, wait() only orders streams: it returns before the GPU is done."""

    def __init__(self, group: TorchGroup, work: dist.Work, number: int, what: str, num_bytes: int) -> None:
        self.group, self.work = group, work
        self.number, self.what, self.num_bytes = number, what, num_bytes
        self.outcome: Outcome | None = None

    def wait(self, deadline: Deadline) -> Outcome:
        if self.outcome is None:
            try:
                with activity.waiting(self.group.name, self.number, self.what, self.num_bytes):
                    if self.group.timed:
                        left_s = max(0.001, min(deadline.left_s, OP_LIMIT_S))
                        self.work.wait(datetime.timedelta(seconds=left_s))
                    else:
                        self.work.wait()
                self.outcome = self.group.lost or Met()
            except RuntimeError as error:
                self.outcome = self.group.fail(str(error))
        return self.outcome


class TorchGroup:
    """See Group. `blame` names the dead after a failure; it may block for a second or two.

    Operations are numbered, so that ranks which wait can be told who has not begun the same one (`name` must be one
    everywhere).
    """

    local = False

    def __init__(
        self, pg: dist.ProcessGroup, device: torch.device, blame: Blame | None = None, name: str = "group"
    ) -> None:
        self.name, self.number = name, 0
        self.pg, self.rank, self.size = pg, pg.rank(), pg.size()
        self.device, self.blame = device, blame
        self.timed = dist.get_backend(pg) == "gloo"
        self.lost: Lost | None = None
        self._lock = threading.Lock()

    def fail(self, reason: str) -> Lost:
        """The group is of no more use: everything under way and later is Lost for this reason."""
        with self._lock:
            if self.lost is None:
                self.lost = Lost((), reason)
                peers = self.blame(reason) if self.blame else ()
                self.lost = Lost(peers, reason)
            return self.lost

    def _start(self, what: str, x: Tensor, begin: Callable[[], dist.Work]) -> Work:
        if self.lost:
            return Done(self.lost)
        self.number += 1
        activity.begun[self.name] = self.number
        try:
            return TorchWork(self, begin(), self.number, what, x.nbytes)
        except RuntimeError as error:
            return Done(self.fail(str(error)))

    def buffer(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]  # type: ignore[assignment]
        return self._start("all_reduce", x, lambda: self.pg.allreduce([x], options))

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        return self._start("all_gather", x, lambda: self.pg.allgather([list(out.unbind(0))], [x]))

    def broadcast(self, x: Tensor, root: int = 0) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._start("broadcast", x, lambda: self.pg.broadcast([x], options))

    def barrier(self) -> Work:
        return self.all_reduce(torch.zeros(1, device=self.device))

    def abort(self, reason: str) -> None:
        with self._lock:
            self.lost = self.lost or Lost((), reason)

    def close(self) -> None:
        if dist.is_initialized() and dist.group.WORLD is self.pg:
            dist.destroy_process_group()
