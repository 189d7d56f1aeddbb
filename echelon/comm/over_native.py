"""A Group over the compiled core: shared memory on one host, TCP among hosts.

The core moves pointers; this file checks what is asked, keeps the tensors alive while the core has their addresses, and turns
its answers into Met and Lost. Tensors on a GPU are staged through pinned memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon import activity
from echelon.clock import Deadline
from echelon.comm import check
from echelon.comm.group import Done, Lost, Met, Op, Outcome, Receipt, Work
from echelon.comm.over_torch import OP_LIMIT_S, Blame

_DTYPES = {
    torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3, torch.int8: 4, torch.uint8: 5, torch.int16: 6,
    torch.uint16: 7, torch.int32: 8, torch.uint32: 9, torch.int64: 10, torch.uint64: 11, torch.bool: 12,
}  # fmt: skip
_OPS = {"sum": 0, "avg": 1, "min": 2, "max": 3, "prod": 4, "and": 5, "or": 6, "xor": 7}
_BARRIER, _ALL_REDUCE, _REDUCE_SCATTER, _ALL_GATHER, _BROADCAST, _REDUCE, _GATHER, _SCATTER = range(8)
_BYTE = _DTYPES[torch.uint8]
CERTAIN = frozenset({"dead", "mismatch", "late"})
"""Causes that need no second opinion about who was lost."""


class NativeWork:
    """One operation of a NativeGroup. It holds the tensors, whose addresses the core has."""

    source: int | None = None

    def __init__(
        self, group: NativeGroup, work: Any, number: int, what: str, held: tuple[Tensor | None, ...], after: Any
    ) -> None:  # fmt: skip
        self.group, self.work, self.held, self.after = group, work, held, after
        self.number, self.what = number, what
        self.outcome: Outcome | None = None
        self._lock = threading.Lock()

    def wait(self, deadline: Deadline) -> Outcome:
        with self._lock:
            if self.outcome is None:
                self.outcome = self._wait(deadline)
            return self.outcome

    def _wait(self, deadline: Deadline) -> Outcome:
        num_bytes = self.held[0].nbytes if self.held and self.held[0] is not None else 0
        with activity.waiting(self.group.name, self.number, self.what, num_bytes):
            met = self.work.wait(min(deadline.left_s, OP_LIMIT_S))
        if not met:
            return self.group.failure()
        if self.after is not None:
            self.after()
        if self.work.peer >= 0:
            self.source = self.work.peer
        return Met()


class NativeGroup:
    """See Group. `core` is a group of the compiled module; `blame` names the dead where the core can only guess.

    Operations are numbered, so that ranks which wait can be told who has not begun the same one (`name` must be one
    everywhere). Those of `urgent` order (the higher lane) overtake the others between two pieces of work.
    """

    local = False

    def __init__(
        self,
        core: Any,
        rank: int,
        size: int,
        device: torch.device,
        name: str = "group",
        blame: Blame | None = None,
    ) -> None:
        self.core, self.rank, self.size, self.device = core, rank, size, device
        self.name, self.number, self.blame = name, 0, blame
        self.lost: Lost | None = None
        self._lock = threading.Lock()
        self._live: deque[NativeWork] = deque()

    def failure(self) -> Lost:
        """Why this group is of no more use."""
        with self._lock:
            if self.lost is None:
                peers, reason, cause = self.core.failure()
                if cause not in CERTAIN and self.blame is not None:
                    peers = self.blame(reason) or peers
                self.lost = Lost(tuple(sorted(peers)), reason)
            return self.lost

    def _start(
        self,
        what: str,
        begin: Callable[[], Any],
        *held: Tensor | None,
        after: Callable[[], object] | None = None,
    ) -> NativeWork | Done:
        if self.core.failed:
            return Done(self.failure())
        self.number += 1
        activity.begun[self.name] = self.number
        work = NativeWork(self, begin(), self.number, what, held, after)
        while self._live and self._live[0].work.done:
            self._live.popleft()
        self._live.append(work)
        return work

    def _reduce_like(
        self, kind: int, what: str, x: Tensor, out: Tensor | None, part: Tensor, op: Op, root: int
    ) -> Work:
        """`part` is one rank's share; x goes in, out (None: x itself) comes back."""
        check.reducible(what, x.dtype, op)
        return self._moved(kind, what, x, out, part, op, root, reduces=True)

    def _moved(
        self, kind: int, what: str, x: Tensor | None, out: Tensor | None, part: Tensor, op: Op, root: int, reduces: bool = False
    ) -> Work:  # fmt: skip
        mine, theirs, after = _staged(x), None, None
        if out is not None:
            theirs = _room_for(out)
            if theirs is not out:
                after = lambda: out.copy_(theirs)  # noqa: E731
        elif x is not None and mine is not x:
            after = lambda: x.copy_(mine)  # type: ignore[arg-type]  # noqa: E731
        dtype = _DTYPES.get(part.dtype)
        count = part.numel()
        if dtype is None:  # complex numbers are pairs of reals; whatever is only moved is bytes
            real = _REAL.get(part.dtype) if reduces else None
            dtype, count = (_DTYPES[real], count * 2) if real is not None else (_BYTE, part.nbytes)
        return self._start(
            what,
            lambda: self.core.collective(kind, dtype, _OPS[op], root, count, _address(mine), _address(theirs), 0),
            mine, theirs, x, out, after=after,
        )  # fmt: skip

    def buffer(self, nbytes: int) -> Tensor:
        if self.device.type != "cpu" or nbytes == 0:
            return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        return torch.from_numpy(self.core.buffer(nbytes))

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        check.whole("all_reduce", x=x)
        return self._reduce_like(_ALL_REDUCE, "all_reduce", x, None, x, op, 0)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> Work:
        check.whole("reduce_scatter", out=out, x=x)
        check.stacked("reduce_scatter", x, out, self.size)
        return self._reduce_like(_REDUCE_SCATTER, "reduce_scatter", x, out, out, op, 0)

    def reduce(self, x: Tensor, root: int = 0, op: Op = "sum") -> Work:
        check.whole("reduce", x=x)
        check.rank("reduce", "root", root, self.size)
        return self._reduce_like(_REDUCE, "reduce", x, None, x, op, root)

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        check.whole("all_gather", out=out, x=x)
        check.stacked("all_gather", out, x, self.size)
        return self._moved(_ALL_GATHER, "all_gather", x, out, x, "sum", 0)

    def gather(self, out: Tensor | None, x: Tensor, root: int = 0) -> Work:
        check.whole("gather", out=out, x=x)
        check.rank("gather", "root", root, self.size)
        check.only_on_root("gather", "out", out, x, root == self.rank, self.size)
        return self._moved(_GATHER, "gather", x, out, x, "sum", root)

    def scatter(self, out: Tensor, x: Tensor | None, root: int = 0) -> Work:
        check.whole("scatter", out=out, x=x)
        check.rank("scatter", "root", root, self.size)
        check.only_on_root("scatter", "x", x, out, root == self.rank, self.size)
        return self._moved(_SCATTER, "scatter", x, out, out, "sum", root)

    def broadcast(self, x: Tensor, root: int = 0) -> Work:
        check.whole("broadcast", x=x)
        check.rank("broadcast", "root", root, self.size)
        return self._moved(_BROADCAST, "broadcast", x, None, x, "sum", root)

    def all_to_all(self, out: Tensor, x: Tensor, out_counts: Sequence[int], counts: Sequence[int]) -> Work:
        check.whole("all_to_all", out=out, x=x)
        check.cut("all_to_all", "x", x, counts, self.size)
        check.cut("all_to_all", "out", out, out_counts, self.size)
        mine, theirs = _staged(x), _room_for(out)
        after = None if theirs is out else lambda: out.copy_(theirs)
        dtype, width = _DTYPES.get(x.dtype), 1
        if dtype is None:
            dtype, width = _BYTE, x.element_size()
        sends, takes = [c * width for c in counts], [c * width for c in out_counts]
        return self._start(
            "all_to_all",
            lambda: self.core.all_to_all(dtype, _address(mine), _address(theirs), sends, takes, 0),
            mine, theirs, x, out, after=after,
        )  # fmt: skip

    def send(self, x: Tensor, peer: int, tag: int = 0) -> Work:
        check.whole("send", x=x)
        check.other("send", peer, self.rank, self.size)
        mine = _staged(x)
        return self._start(
            "send", lambda: self.core.message(True, _address(mine), x.nbytes, peer, tag), mine, x
        )

    def recv(self, x: Tensor, peer: int | None, tag: int = 0) -> Receipt:
        check.whole("recv", x=x)
        check.other("recv", peer, self.rank, self.size)
        room, whom = _room_for(x), -1 if peer is None else peer
        return self._start(
            "recv", lambda: self.core.message(False, _address(room), x.nbytes, whom, tag), room, x,
            after=None if room is x else lambda: x.copy_(room),
        )  # fmt: skip

    def barrier(self) -> Work:
        return self._start("barrier", lambda: self.core.collective(_BARRIER, _BYTE, 0, 0, 0, 0, 0, 0))

    def abort(self, reason: str) -> None:
        self.core.abort([], reason)

    def close(self) -> None:
        self.core.close()


_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _staged(x: Tensor | None) -> Tensor | None:
    """x where the core can read it: itself on the CPU, a pinned copy of what lies on a GPU."""
    if x is None or x.device.type == "cpu":
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return host


def _room_for(out: Tensor) -> Tensor:
    """Where the core puts what `out` is to become."""
    return out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
