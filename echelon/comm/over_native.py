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
from echelon.comm.group import Lost, Met, Op, Outcome, Receipt, Work
from echelon.comm.over_torch import OP_LIMIT_S, Blame
from echelon.mesh import moves

_DTYPES = {
    torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3, torch.int8: 4, torch.uint8: 5, torch.int16: 6,
    torch.uint16: 7, torch.int32: 8, torch.uint32: 9, torch.int64: 10, torch.uint64: 11, torch.bool: 12,
}  # fmt: skip
_OPS = {"sum": 0, "avg": 1, "min": 2, "max": 3, "prod": 4, "and": 5, "or": 6, "xor": 7}
_BARRIER, _ALL_REDUCE, _REDUCE_SCATTER, _ALL_GATHER, _BROADCAST, _REDUCE, _GATHER, _SCATTER = range(8)
_VERBS: tuple[moves.Verb, ...] = (
    "barrier", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter",
)  # fmt: skip
_BYTE = _DTYPES[torch.uint8]
After = Callable[[], object] | None
"""What is done to the tensors when the operation is over."""
MET = Met()
CERTAIN = frozenset({"dead", "mismatch", "late"})
"""Causes that need no second opinion about who was lost."""


LOOK_NS = 20_000
"""A wait this short is not worth being told: whoever looks at what this process waits in would not see it."""


class NativeWork:
    """One operation of a NativeGroup. It holds the tensors, whose addresses the core has."""

    __slots__ = ("_lock", "after", "group", "held", "number", "outcome", "source", "what", "where", "work")

    def __init__(
        self, group: NativeGroup, work: Any, number: int, what: str, held: tuple[Tensor | None, ...], after: After = None
    ) -> None:  # fmt: skip
        self.group, self.work, self.number, self.what, self.held, self.after = (
            group,
            work,
            number,
            what,
            held,
            after,
        )
        self.where = group.name
        self.outcome: Outcome | None = None
        self.source: int | None = None
        self._lock = None if after is None else threading.Lock()

    def wait(self, deadline: Deadline) -> Outcome:
        if self.outcome is not None:
            return self.outcome
        if self.work.look(LOOK_NS) == 1:
            activity.moved()
            met = True
        else:
            with activity.waiting(self.where, self.number, self.what, _num_bytes(self.held)):
                met = self.work.wait(min(deadline.left_s, OP_LIMIT_S))
        if not met:
            self.outcome = self.group.failure()
        elif self._lock is None:
            self.outcome, self.held = MET, ()  # the group remembers its last operations: their tensors may go
        else:
            self._finish(self._lock)
        return self.outcome  # type: ignore[return-value]

    def _finish(self, lock: threading.Lock) -> None:
        """What remains to be done with the result, once, whoever waits."""
        with lock:
            if self.outcome is None:
                assert self.after is not None
                self.after()
                self.outcome = MET


class Received(NativeWork):
    """A recv."""

    __slots__ = ()

    def wait(self, deadline: Deadline) -> Outcome:
        outcome = super().wait(deadline)
        if outcome is MET:
            self.source = self.work.peer
        return outcome


class NativeGroup:
    """See Group. `core` is a group of the compiled module; `blame` names the dead where the core can only guess.

    Operations are numbered, so that ranks which wait can be told who has not begun the same one (`name` must be one
    everywhere).
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
        lane: int = 0,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.ranks = ranks or range(size)
        """The ranks of the run that these are, for whoever is told of them."""
        self.core, self.rank, self.size, self.device = core, rank, size, device
        self.name, self.number, self.blame, self.lane = name, 0, blame, lane
        self.lost: Lost | None = None
        self.sent_bytes = 0.0
        self._rates = [
            [dtype.itemsize * moves.factor(verb, size) for dtype in _DTYPES] for verb in _VERBS
        ]  # by the core's numbers: bytes that an element of an operation lets this rank send
        self._lock = threading.Lock()
        self._live: deque[NativeWork] = deque()

    def failure(self) -> Lost:
        """Why this group is of no more use."""
        with self._lock:
            if self.lost is None:
                peers, reason, cause = self.core.failure()
                peers = [self.ranks[peer] for peer in peers]
                if cause not in CERTAIN and self.blame is not None:
                    peers = self.blame(reason) or peers
                self.lost = Lost(tuple(sorted(set(peers))), reason)
            return self.lost

    def urgent(self) -> NativeGroup:
        """The same ranks, in the higher lane: what is begun here overtakes what is under way, between two pieces of work."""
        return NativeGroup(
            self.core, self.rank, self.size, self.device, f"{self.name}-urgent", self.blame, 1, self.ranks
        )

    def _begun(self, what: str, work: Any, held: tuple[Tensor | None, ...], after: After = None) -> NativeWork:  # fmt: skip
        self.number = number = self.number + 1
        activity.begun[self.name] = number
        return self._kept(NativeWork(self, work, number, what, held, after))

    def _kept(self, begun: NativeWork) -> NativeWork:
        """Until it is over: the core has the addresses of its tensors."""
        live = self._live
        while live and (live[0].outcome is not None or live[0].work.done):
            live.popleft()
        live.append(begun)
        return begun

    def _reduced(
        self, kind: int, what: str, x: Tensor, out: Tensor | None, part: Tensor, op: Op, root: int
    ) -> Work:
        """`part` is one rank's share; x goes in, out (None: x itself) comes back."""
        codes = _REDUCED.get((part.dtype, op))
        if codes is None:
            check.reducible(what, x.dtype, op)
            codes = _DTYPES[_REAL[x.dtype]], _OPS[op]  # complex numbers are pairs of reals
            return self._moved(kind, what, x, out, codes[0], codes[1], 2 * part.numel(), root)
        return self._moved(kind, what, x, out, codes[0], codes[1], part.numel(), root)

    def _copied(
        self, kind: int, what: str, x: Tensor | None, out: Tensor | None, part: Tensor, root: int
    ) -> Work:
        dtype = _DTYPES.get(part.dtype)
        if dtype is None:  # whatever is only moved is bytes
            return self._moved(kind, what, x, out, _BYTE, 0, part.nbytes, root)
        return self._moved(kind, what, x, out, dtype, 0, part.numel(), root)

    def _moved(
        self, kind: int, what: str, x: Tensor | None, out: Tensor | None, dtype: int, op: int, count: int, root: int
    ) -> Work:  # fmt: skip
        self.sent_bytes += count * self._rates[kind][dtype]
        if (x is None or x.is_cpu) and (out is None or out.is_cpu):
            at, to = 0 if x is None else x.data_ptr(), 0 if out is None else out.data_ptr()
            return self._begun(
                what, self.core.collective(kind, dtype, op, root, count, at, to, self.lane), (x, out)
            )
        mine, theirs, after = _staged(x), None, None
        if out is not None:
            theirs = _room_for(out)
            after = lambda: out.copy_(theirs)  # noqa: E731
        elif x is not None:
            after = lambda: x.copy_(mine)  # type: ignore[arg-type]  # noqa: E731
        work = self.core.collective(kind, dtype, op, root, count, _address(mine), _address(theirs), self.lane)
        return self._begun(what, work, (mine, theirs, x, out), after)

    def buffer(self, nbytes: int) -> Tensor:
        if self.device.type != "cpu" or nbytes == 0:
            return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        return torch.from_numpy(self.core.buffer(nbytes))

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        if not check.plain(x):
            check.whole("all_reduce", x=x)
        return self._reduced(_ALL_REDUCE, "all_reduce", x, None, x, op, 0)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> Work:
        check.whole("reduce_scatter", out=out, x=x)
        check.stacked("reduce_scatter", x, out, self.size)
        return self._reduced(_REDUCE_SCATTER, "reduce_scatter", x, out, out, op, 0)

    def reduce(self, x: Tensor, root: int = 0, op: Op = "sum") -> Work:
        check.whole("reduce", x=x)
        check.rank("reduce", "root", root, self.size)
        return self._reduced(_REDUCE, "reduce", x, None, x, op, root)

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        check.whole("all_gather", out=out, x=x)
        check.stacked("all_gather", out, x, self.size)
        return self._copied(_ALL_GATHER, "all_gather", x, out, x, 0)

    def gather(self, out: Tensor | None, x: Tensor, root: int = 0) -> Work:
        check.whole("gather", out=out, x=x)
        check.rank("gather", "root", root, self.size)
        check.only_on_root("gather", "out", out, x, root == self.rank, self.size)
        return self._copied(_GATHER, "gather", x, out, x, root)

    def scatter(self, out: Tensor, x: Tensor | None, root: int = 0) -> Work:
        check.whole("scatter", out=out, x=x)
        check.rank("scatter", "root", root, self.size)
        check.only_on_root("scatter", "x", x, out, root == self.rank, self.size)
        return self._copied(_SCATTER, "scatter", x, out, out, root)

    def broadcast(self, x: Tensor, root: int = 0) -> Work:
        check.whole("broadcast", x=x)
        check.rank("broadcast", "root", root, self.size)
        return self._copied(_BROADCAST, "broadcast", x, None, x, root)

    def all_to_all(self, out: Tensor, x: Tensor, out_counts: Sequence[int], counts: Sequence[int]) -> Work:
        check.whole("all_to_all", out=out, x=x)
        check.cut("all_to_all", "x", x, counts, self.size)
        check.cut("all_to_all", "out", out, out_counts, self.size)
        mine, theirs = _staged(x), _room_for(out)
        dtype, width = _DTYPES.get(x.dtype), 1
        if dtype is None:
            dtype, width = _BYTE, x.element_size()
        sends, takes = [c * width for c in counts], [c * width for c in out_counts]
        self.sent_bytes += (x.numel() - counts[self.rank]) * x.element_size()
        work = self.core.all_to_all(dtype, _address(mine), _address(theirs), sends, takes, self.lane)
        after = None if theirs is out else lambda: out.copy_(theirs)
        return self._begun("all_to_all", work, (mine, theirs, x, out), after)

    def send(self, x: Tensor, peer: int, tag: int = 0) -> Work:
        check.whole("send", x=x)
        check.other("send", peer, self.rank, self.size)
        mine = _staged(x)
        self.sent_bytes += x.nbytes
        work = self.core.message(True, _address(mine), x.nbytes, peer, tag)
        return self._message(peer, NativeWork(self, work, activity.ANYBODY, "send", (mine, x)))

    def recv(self, x: Tensor, peer: int | None, tag: int = 0) -> Receipt:
        check.whole("recv", x=x)
        check.other("recv", peer, self.rank, self.size)
        room = _room_for(x)
        work = self.core.message(False, room.data_ptr(), x.nbytes, -1 if peer is None else peer, tag)
        after = None if room is x else lambda: x.copy_(room)
        return self._message(peer, Received(self, work, activity.ANYBODY, "recv", (room, x), after))

    def _message(self, peer: int | None, work: NativeWork) -> NativeWork:
        """A message is between two: who waits in it waits for the other one, if that is known."""
        if peer is None or self.name.startswith(
            activity.TORCH
        ):  # torch's groups do not say who of the run they are
            self.number = work.number = activity.begun[self.name] = self.number + 1
        else:
            work.where = f"{activity.WORKER}{self.ranks[peer]} in {self.name}"
        return self._kept(work)

    def barrier(self) -> Work:
        return self._begun("barrier", self.core.collective(_BARRIER, _BYTE, 0, 0, 0, 0, 0, self.lane), ())

    def abort(self, reason: str) -> None:
        self.core.abort([], reason)

    def close(self) -> None:
        self.core.close()


_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}


_REDUCED = {
    (dtype, op): (code, _OPS[op])
    for dtype, code in _DTYPES.items()
    for op in check.OPS
    if check.has_meaning(dtype, op)
}
"""The core's codes of whatever may be reduced as it is."""


def _num_bytes(held: tuple[Tensor | None, ...]) -> int:
    return held[0].nbytes if held and held[0] is not None else 0


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
