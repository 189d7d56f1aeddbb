"""A Group over a torch.distributed process group: gloo on CPU, NCCL on CUDA.

What torch raises when a peer is gone (gloo: about 20 ms after a death on the same host) or when its time is over
becomes Lost here, and stays: a gloo group that failed once is of no further use.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from echelon import activity
from echelon.clock import Deadline
from echelon.comm import check
from echelon.comm.group import Done, Lost, Met, Op, Outcome, Receipt, Work
from echelon.comm.plain import as_bytes, carried
from echelon.mesh import moves

After = Callable[[], object] | None
"""What is done to the tensors when the operation is over."""

Blame = Callable[[str], tuple[int, ...]]
"""Asks the roster which peers are gone, given what torch said."""

_OPS = {
    "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT, "and": dist.ReduceOp.BAND, "or": dist.ReduceOp.BOR, "xor": dist.ReduceOp.BXOR,
}  # fmt: skip
OP_LIMIT_S = 1800.0
"""An operation never waits longer, whoever waits; deaths are told much earlier by the supervisor."""


class TorchWork:
    """One operation of a TorchGroup. On CUDA, wait() only orders streams: it returns before the GPU is done."""

    source: int | None = None

    def __init__(
        self, group: TorchGroup, work: dist.Work, number: int, what: str, num_bytes: int, after: After
    ) -> None:
        self.group, self.work, self.after = group, work, after
        self.number, self.what, self.num_bytes = number, what, num_bytes
        self.outcome: Outcome | None = None
        self._lock = threading.Lock()

    def wait(self, deadline: Deadline) -> Outcome:
        with self._lock:
            if self.outcome is None:
                self.outcome = self._wait(deadline)
            return self.outcome

    def _wait(self, deadline: Deadline) -> Outcome:
        try:
            with activity.waiting(self.group.name, self.number, self.what, self.num_bytes):
                if self.group.timed:
                    left_s = max(0.001, min(deadline.left_s, OP_LIMIT_S))
                    self.work.wait(datetime.timedelta(seconds=left_s))
                else:
                    self.work.wait()
        except RuntimeError as error:
            return self.group.fail(str(error))
        if self.group.lost:
            return self.group.lost
        if self.after is not None:
            self.after()
        return Met()


class AnySourceWork(TorchWork):
    """A recv from anybody."""

    def _wait(self, deadline: Deadline) -> Outcome:
        outcome = super()._wait(deadline)
        if isinstance(outcome, Met):
            self.source = self.work._source_rank()
        return outcome


class TorchGroup:
    """See Group. `blame` names the dead after a failure; it may block for a second or two.

    Operations are numbered, so that ranks which wait can be told who has not begun the same one (`name` must be one
    everywhere). `timed` says whether torch's waits take a time limit: gloo's do, NCCL's do not. NCCL has no tags, and
    no recv from anybody.
    """

    local = False

    def __init__(
        self,
        pg: dist.ProcessGroup,
        device: torch.device,
        blame: Blame | None = None,
        name: str = "group",
        timed: bool | None = None,
    ) -> None:
        self.name, self.number = name, 0
        self.pg: Any = pg
        self.rank, self.size = pg.rank(), pg.size()
        self.device, self.blame = device, blame
        self.timed = dist.get_backend(pg) == "gloo" if timed is None else timed
        self.lost: Lost | None = None
        self.sent_bytes = 0.0
        self._rates = {str(verb): moves.factor(verb, self.size) for verb in get_args(moves.Verb)}
        self._lock = threading.Lock()

    def fail(self, reason: str) -> Lost:
        """The group is of no more use: everything under way and later is Lost for this reason."""
        with self._lock:
            if self.lost is None:
                self.lost = Lost((), reason)
                peers = self.blame(reason) if self.blame else ()
                self.lost = Lost(peers, reason)
            return self.lost

    def _start(
        self,
        what: str,
        x: Tensor,
        begin: Callable[[], dist.Work],
        after: After = None,
        part: Tensor | None = None,
    ) -> Work:
        """`part`: one rank's share, where x is not it."""
        if self.lost:
            return Done(self.lost)
        if what in self._rates:
            self.sent_bytes += (x if part is None else part).nbytes * self._rates[what]
        self.number += 1
        activity.begun[self.name] = self.number
        try:
            return TorchWork(self, begin(), self.number, what, x.nbytes, after)
        except RuntimeError as error:
            return Done(self.fail(str(error)))

    def _start_pair(
        self, kind: type[TorchWork], what: str, x: Tensor, begin: Callable[[], dist.Work]
    ) -> Receipt:
        """A send or recv: it has no number, since only two ranks take part."""
        if self.lost:
            return Done(self.lost)
        try:
            return kind(self, begin(), activity.ANYBODY, what, x.nbytes, None)
        except RuntimeError as error:
            return Done(self.fail(str(error)))

    def buffer(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        check.whole("all_reduce", x=x)
        check.reducible("all_reduce", x.dtype, op)
        wire = carried(x, op)
        options = _options(dist.AllreduceOptions(), wire.op)
        return self._start("all_reduce", x, lambda: self.pg.allreduce([wire.tensor], options), wire.back)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> Work:
        check.whole("reduce_scatter", out=out, x=x)
        check.stacked("reduce_scatter", x, out, self.size)
        check.reducible("reduce_scatter", x.dtype, op)
        wire, mine = carried(x, op), carried(out, op)
        options = _options(dist.ReduceScatterOptions(), wire.op)
        flat = mine.tensor.reshape(-1), wire.tensor.reshape(-1)
        return self._start(
            "reduce_scatter", x, lambda: self.pg._reduce_scatter_base(*flat, options), mine.back, part=out
        )

    def reduce(self, x: Tensor, root: int = 0, op: Op = "sum") -> Work:
        check.rank("reduce", "root", root, self.size)
        check.whole("reduce", x=x)
        check.reducible("reduce", x.dtype, op)
        wire = carried(x if root == self.rank else x.clone(), op)  # torch uses the others' tensors on its way
        options = _options(dist.ReduceOptions(), wire.op)
        options.rootRank = root
        return self._start("reduce", x, lambda: self.pg.reduce([wire.tensor], options), wire.back)

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        check.whole("all_gather", out=out, x=x)
        check.stacked("all_gather", out, x, self.size)
        return self._start("all_gather", x, lambda: self.pg.allgather([_rows(out)], [as_bytes(x)]))

    def gather(self, out: Tensor | None, x: Tensor, root: int = 0) -> Work:
        check.rank("gather", "root", root, self.size)
        check.whole("gather", out=out, x=x)
        check.only_on_root("gather", "out", out, x, self.rank == root, self.size)
        options = dist.GatherOptions()
        options.rootRank = root
        rows = [] if out is None else [_rows(out)]
        return self._start("gather", x, lambda: self.pg.gather(rows, [as_bytes(x)], options))

    def scatter(self, out: Tensor, x: Tensor | None, root: int = 0) -> Work:
        check.rank("scatter", "root", root, self.size)
        check.whole("scatter", out=out, x=x)
        check.only_on_root("scatter", "x", x, out, self.rank == root, self.size)
        options = dist.ScatterOptions()
        options.rootRank = root
        rows = [] if x is None else [_rows(x)]
        return self._start("scatter", out, lambda: self.pg.scatter([as_bytes(out)], rows, options))

    def all_to_all(self, out: Tensor, x: Tensor, out_counts: Sequence[int], counts: Sequence[int]) -> Work:
        check.whole("all_to_all", out=out, x=x)
        check.cut("all_to_all", "out", out, out_counts, self.size)
        check.cut("all_to_all", "x", x, counts, self.size)
        cuts = [n * out.itemsize for n in out_counts], [n * x.itemsize for n in counts]
        self.sent_bytes += (x.numel() - counts[self.rank]) * x.itemsize
        options = dist.AllToAllOptions()
        return self._start(
            "all_to_all", x[:0], lambda: self.pg.alltoall_base(as_bytes(out), as_bytes(x), *cuts, options)
        )

    def broadcast(self, x: Tensor, root: int = 0) -> Work:
        check.rank("broadcast", "root", root, self.size)
        check.whole("broadcast", x=x)
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._start("broadcast", x, lambda: self.pg.broadcast([as_bytes(x)], options))

    def send(self, x: Tensor, peer: int, tag: int = 0) -> Work:
        check.other("send", peer, self.rank, self.size)
        check.whole("send", x=x)
        self.sent_bytes += x.nbytes
        return self._start_pair(
            TorchWork, f"send to rank {peer}", x, lambda: self.pg.send([as_bytes(x)], peer, tag)
        )

    def recv(self, x: Tensor, peer: int | None, tag: int = 0) -> Receipt:
        check.other("recv", peer, self.rank, self.size)
        check.whole("recv", x=x)
        if peer is None:
            return self._start_pair(
                AnySourceWork, "recv from anybody", x, lambda: self.pg.recv_anysource([as_bytes(x)], tag)
            )
        work = self._start_pair(
            TorchWork, f"recv from rank {peer}", x, lambda: self.pg.recv([as_bytes(x)], peer, tag)
        )
        work.source = peer
        return work

    def barrier(self) -> Work:
        word, options = torch.zeros(1, device=self.device), _options(dist.AllreduceOptions(), "sum")
        return self._start("barrier", word, lambda: self.pg.allreduce([word], options))

    def abort(self, reason: str) -> None:
        with self._lock:
            self.lost = self.lost or Lost((), reason)

    def close(self) -> None:
        if dist.is_initialized() and dist.group.WORLD is self.pg:
            dist.destroy_process_group()


def _options(options: Any, op: Op) -> Any:
    options.reduceOp = _OPS[op]
    return options


def _rows(x: Tensor) -> list[Tensor]:
    """One flat row of bytes a rank."""
    return list(as_bytes(x).view(x.shape[0], -1).unbind(0)) if x.numel() else [as_bytes(row) for row in x]
