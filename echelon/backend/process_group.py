"""A process group of torch.distributed over any Group.

Calls come from Python, or from torch's C++ (DDP's reducer, functional collectives) through its trampoline, which looks these
methods up by name. What C++ has no trampoline for (reduce, gather, scatter, the single forms) it cannot reach here; it
then says that no backend is there for the device. Names come in pairs, since 2.13 renamed some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.distributed_c10d import PrefixStore, Store

from echelon.backend import monitored, shapes, sparse
from echelon.backend.request import OnLost, Request, Waiter
from echelon.backend.shapes import RefusedError
from echelon.backend.stage import Stage
from echelon.clock import Deadline
from echelon.comm.group import Group, Op, Work
from echelon.errors import UsageError

CLOSE_S = 5.0

_T: Any = dist.ReduceOp.RedOpType
_OPS: dict[Any, Op] = {
    _T.SUM: "sum", _T.AVG: "avg", _T.MIN: "min", _T.MAX: "max", _T.PRODUCT: "prod", _T.BAND: "and", _T.BOR: "or",
    _T.BXOR: "xor",
}  # fmt: skip


_TorchProcessGroup: Any = dist.ProcessGroup
"""Its stubs know one spelling of each call; it takes several."""


class ProcessGroup(_TorchProcessGroup):
    """See torch.distributed.ProcessGroup. Every operation begins at once and returns a Request.

    `on_lost`: when given, lost operations complete with zeros and it is told; otherwise waiting raises.
    """

    def __init__(
        self, group: Group, store: Store, name: str, timeout: timedelta, on_lost: OnLost | None = None
    ) -> None:
        super().__init__(group.rank, group.size)
        self.group, self.store, self.timeout, self.on_lost = group, store, timeout, on_lost
        self.num_begun = 0
        self._monitored = 0
        self._names = {"name": name, "desc": "undefined"}
        self._waiter = Waiter(f"echelon-{name}")

    # -- reduce ----------------------------------------------------------------------------------------------------

    def allreduce(
        self, tensors: Sequence[Tensor] | Tensor, opts: Any = None, *, op: Any = None, timeout: Any = None
    ) -> Request:
        """`opts` may be a ReduceOp as well."""
        if not isinstance(opts, dist.AllreduceOptions):
            op, opts = op or opts, dist.AllreduceOptions()
            opts.reduceOp = op or dist.ReduceOp.SUM
            opts.timeout = timeout or opts.timeout
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        if tensors[0].layout is not torch.strided:
            return self._sparse(tensors[0], opts)
        stage = Stage(tensors)
        changed = [stage.change(x) for x in tensors]
        return self._begin("all_reduce", stage, opts, *(
            lambda x=x: self.group.all_reduce(x, _op(opts)) for x in changed
        ))  # fmt: skip

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Request:
        """As one message for each type."""
        opts = opts or dist.AllreduceCoalescedOptions()
        if any(x.layout is not torch.strided for x in tensors):
            raise RefusedError("all_reduce_coalesced: sparse tensors cannot be put together")
        stage = Stage(tensors)
        kinds = sorted({x.dtype for x in tensors}, key=str)
        flats = [stage.change_flat([x for x in tensors if x.dtype == kind]) for kind in kinds]
        return self._begin("all_reduce_coalesced", stage, opts, *(
            lambda x=x: self.group.all_reduce(x, _op(opts)) for x in flats
        ))  # fmt: skip

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Request:
        opts = opts or dist.ReduceOptions()
        root = opts.rootRank == self.group.rank
        stage = Stage(tensors, kept=not root)
        x = stage.change(tensors[0]) if root else stage.read(tensors[0])
        return self._begin("reduce", stage, opts, lambda: self.group.reduce(x, opts.rootRank, _op(opts)))

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Request:
        opts = opts or dist.ReduceScatterOptions()
        shapes.alike(self.group.size, "reduce_scatter", inputs[0], outputs[0])
        stage = Stage(outputs)
        out, x = stage.write(outputs[0]), stage.read_rows(inputs[0])
        return self._begin(
            "reduce_scatter", stage, opts, lambda: self.group.reduce_scatter(out, x, _op(opts))
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Request:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Request:
        opts = opts or dist.ReduceScatterOptions()
        stage, pairs = Stage(outputs), []
        for output, input in zip(outputs, inputs, strict=True):
            shapes.rows(self.group.size, "reduce_scatter_single", input, output)
            out, x = stage.write(output).reshape(-1), stage.read(input)
            pairs.append((out, x.reshape(self.group.size, -1)))
        return self._begin("reduce_scatter_single", stage, opts, *(
            lambda out=out, x=x: self.group.reduce_scatter(out, x, _op(opts)) for out, x in pairs
        ))  # fmt: skip

    # -- move ------------------------------------------------------------------------------------------------------

    def broadcast(
        self, tensors: Sequence[Tensor] | Tensor, opts: Any = None, *, root: int = 0, timeout: Any = None
    ) -> Request:
        """`opts` may be the root as well."""
        if not isinstance(opts, dist.BroadcastOptions):
            given, opts = root if opts is None else opts, dist.BroadcastOptions()
            opts.rootRank, opts.timeout = given, timeout or opts.timeout
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        mine = opts.rootRank == self.group.rank
        stage = Stage(tensors, kept=mine)
        x = stage.read(tensors[0]) if mine else stage.write(tensors[0])
        return self._begin("broadcast", stage, opts, lambda: self.group.broadcast(x, opts.rootRank))

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Request:
        return self._all_gather(outputs, inputs, opts or AllgatherOptions())

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Request:
        """outputs[r][i] becomes rank r's inputs[i]."""
        by_input = [[of_rank[i] for of_rank in outputs] for i in range(len(inputs))]
        return self._all_gather(by_input, inputs, opts or AllgatherOptions())

    def _all_gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> Request:
        stage, pairs = Stage([x for rows in outputs for x in rows]), []
        for rows, x in zip(outputs, inputs, strict=True):
            shapes.alike(self.group.size, "all_gather", rows, x)
            pairs.append((stage.write_rows(rows), stage.read(x)))
        return self._begin("all_gather", stage, opts, *(
            lambda out=out, x=x: self.group.all_gather(out, x) for out, x in pairs
        ))  # fmt: skip

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Request:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Request:
        stage, pairs = Stage(outputs), []
        for output, input in zip(outputs, inputs, strict=True):
            shapes.rows(self.group.size, "all_gather_single", output, input)
            pairs.append((stage.write(output).reshape(self.group.size, -1), stage.read(input).reshape(-1)))
        return self._begin("all_gather_single", stage, opts or AllgatherOptions(), *(
            lambda out=out, x=x: self.group.all_gather(out, x) for out, x in pairs
        ))  # fmt: skip

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Request:
        opts = opts or dist.GatherOptions()
        root = opts.rootRank == self.group.rank
        stage = Stage(outputs[0] if root else ())
        if root:
            shapes.alike(self.group.size, "gather", outputs[0], inputs[0])
        out = stage.write_rows(outputs[0]) if root else None
        x = stage.read(inputs[0])
        return self._begin("gather", stage, opts, lambda: self.group.gather(out, x, opts.rootRank))

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Request:
        opts = opts or dist.ScatterOptions()
        root = opts.rootRank == self.group.rank
        stage = Stage(outputs)
        if root:
            shapes.alike(self.group.size, "scatter", inputs[0], outputs[0])
        out = stage.write(outputs[0])
        x = stage.read_rows(inputs[0]) if root else None
        return self._begin("scatter", stage, opts, lambda: self.group.scatter(out, x, opts.rootRank))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> Request:  # fmt: skip
        """Splits are rows of the first dim; none means equal parts."""
        counts = [
            shapes.splits(self.group.size, x, splits)
            for x, splits in ((output, output_splits), (input, input_splits))
        ]
        stage = Stage([output])
        out, x = stage.write(output).reshape(-1), stage.read(input).reshape(-1)
        return self._begin(
            "all_to_all",
            stage,
            opts or dist.AllToAllOptions(),
            lambda: self.group.all_to_all(out, x, *counts),
        )

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Request:
        stage = Stage(outputs)
        out, x = stage.write_flat(outputs), stage.read_flat(inputs)
        counts = [x.numel() for x in outputs], [x.numel() for x in inputs]
        return self._begin(
            "all_to_all",
            stage,
            opts or dist.AllToAllOptions(),
            lambda: self.group.all_to_all(out, x, *counts),
        )

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int = 0) -> Request:
        stage = Stage()
        x = stage.read(tensors[0])
        return self._begin(
            f"send to rank {dstRank}", stage, None, lambda: self.group.send(x, dstRank, tag), ordered=False
        )

    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int = 0) -> Request:
        stage = Stage(tensors)
        x = stage.write(tensors[0])
        return self._begin(
            f"recv from rank {srcRank}", stage, None, lambda: self.group.recv(x, srcRank, tag), ordered=False
        )

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Request:
        stage = Stage(tensors)
        x = stage.write(tensors[0])
        return self._begin(
            "recv from any rank", stage, None, lambda: self.group.recv(x, None, tag), ordered=False
        )

    # -- meet ------------------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, *, timeout: timedelta | None = None) -> Request:
        opts = opts or dist.BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        return self._begin("barrier", Stage(), opts, self.group.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Blocks; raises on every rank with the names of those that rank 0 did not see in time."""
        self._monitored += 1
        store = PrefixStore(f"monitored-{self._monitored}/", self.store)
        limit = self.timeout if timeout is None else timeout
        monitored.barrier(store, self.group.rank, self.group.size, limit.total_seconds(), wait_all_ranks)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- what torch asks of a group --------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "echelon"

    def setGroupName(self, name: str) -> None:
        self._names["name"] = name

    def getGroupName(self) -> str:
        return self._names["name"]

    def setGroupDesc(self, desc: str) -> None:
        self._names["desc"] = desc

    def getGroupDesc(self) -> str:
        return self._names["desc"]

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in devices()]

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def _set_sequence_number_for_group(self) -> None:
        self.num_begun = 0

    def _get_sequence_number_for_group(self) -> int:
        return self.num_begun

    def abort(self) -> None:
        self.group.abort("this process group was aborted")

    def shutdown(self) -> None:
        self._waiter.close(Deadline.after(CLOSE_S))
        self.group.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _begin(
        self, what: str, stage: Stage, opts: Any, *begin: Callable[[], Work], ordered: bool = True
    ) -> Request:
        limit = getattr(opts, "timeout", None)
        seconds = limit.total_seconds() if limit is not None else 0.0
        deadline = Deadline.after(seconds if seconds > 0 else self.timeout.total_seconds())
        self.num_begun += ordered
        stage.ready()
        try:
            works = [start() for start in begin]
        except UsageError as error:
            raise RefusedError(error.message, remedy=error.remedy) from None
        return Request(what, works, stage, deadline, self._waiter, self.on_lost, ordered)

    def _sparse(self, x: Tensor, opts: Any) -> Request:
        if _op(opts) != "sum":
            raise RefusedError(f"all_reduce: sparse tensors can be summed, not {_op(opts)!r}")
        stage = Stage([x])
        works = sparse.all_reduce(self.group, x, stage, Deadline.after(self.timeout.total_seconds()))
        return self._begin("all_reduce of sparse tensors", stage, opts, *(lambda w=w: w for w in works))


def devices() -> list[str]:
    """The kinds of devices whose tensors we take."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _op(opts: Any) -> Op:
    kind = opts.reduceOp.op if hasattr(opts.reduceOp, "op") else opts.reduceOp
    if kind not in _OPS:
        raise RefusedError(f"{kind} is not there", remedy=f"Use one of {', '.join(str(k) for k in _OPS)}.")
    return _OPS[kind]
