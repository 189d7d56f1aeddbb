"""What fully_shard sends and gathers, over a Group of ours: gradients weighted by the rank's share and summed, a few at a time.

A lost operation leaves zeros and is told at the step's commit, like every other loss.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon import activity
from echelon.clock import Deadline
from echelon.comm.group import Group, Lost, Outcome, Work
from echelon.parallel.buckets import Bucket
from echelon.parallel.gradsync import Share
from echelon.parallel.wire import PlainWire, Traffic

CARRY_LIMIT_S = 1800.0
UNDER_WAY = 2
"""Reductions that may be on their way at a time: each holds one unit's whole gradients."""
MODULUS = 1 << 20

Then = Callable[[Tensor], None]


class Carrier:
    """Two groups, and what became of their operations. `replicas`: those that hold the same shards, where there are several copies."""

    def __init__(self, shards: Group, replicas: Group) -> None:
        self.shards, self.replicas = shards, replicas
        self.share: Callable[[], Share] = Share
        self.outcomes: list[Outcome] = []
        self.traffic = Traffic()
        self.wait_s = 0.0
        self.trace = 0
        """Which units were gathered and reduced so far, in order, as a number: the same on every rank, or they mix up layers."""
        self._sums: deque[tuple[Work, Tensor, Tensor, Then | None]] = deque()

    def note(self, unit: int) -> None:
        self.trace = (self.trace * 31 + unit + 1) % MODULUS

    def sent(self, num_bytes: int, ranks: int, times: int = 1) -> None:
        num_bytes = times * (ranks - 1) * num_bytes // ranks
        self.traffic.sent_bytes += num_bytes
        self.traffic.plain_bytes += num_bytes

    @activity.named("shards of the model")
    def end(self, work: Work, out: Tensor) -> bool:
        """Blocks until `out` is there, or zeros. False where a peer was lost: the operation may still write to `out`."""
        began = time.perf_counter()
        outcome = work.wait(Deadline.after(CARRY_LIMIT_S))
        self.wait_s += time.perf_counter() - began
        if isinstance(outcome, Lost):
            self.outcomes.append(outcome)
            out.zero_()
            return False
        return True

    def reduce(self, out: Tensor, x: Tensor, now: bool, then: Then | None = None) -> None:
        """out becomes this rank's part of the weighted sum of all ranks' x; with `now` before it returns, else once drained. `then` is
        called with it when it is there."""
        share = self.share()
        weight = share.weight * (share.closing if share.last else 1.0)
        if not share.counts:
            x.zero_()
        elif weight != 1.0:
            x.mul_(weight)
        self.sent(x.nbytes, self.shards.size)
        work = self.shards.reduce_scatter(out, x.view(self.shards.size, -1))
        if not self.replicas.local:
            self.end(work, out)
            self.sent(out.nbytes, self.replicas.size, 2)
            self.end(self.replicas.all_reduce(out), out)
            if then is not None:
                then(out)
            return
        self._sums.append((work, out, x, then))
        while len(self._sums) > (0 if now else UNDER_WAY):
            self._end_first()

    def drain(self) -> None:
        """Every sum that was begun is there."""
        while self._sums:
            self._end_first()

    def _end_first(self) -> None:
        work, out, _, then = self._sums.popleft()
        self.end(work, out)
        if then is not None:
            then(out)


class Gathering(dist.Work):  # type: ignore[misc]
    """An all-gather under way, as torch's Work."""

    def __init__(self, carrier: Carrier, work: Work, out: Tensor) -> None:
        super().__init__()
        self.carrier, self.work, self.out = carrier, work, out
        self.over = False

    def wait(self, timeout: Any = None) -> bool:
        if not self.over:
            self.over = True
            self.carrier.end(self.work, self.out)
        return True


class _Plain:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Plain):
    """One unit's parameters: what fully_shard calls an AllGather."""

    def __init__(self, carrier: Carrier, unit: int) -> None:
        self.carrier, self.unit = carrier, unit

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        shards = self.carrier.shards
        self.carrier.note(2 * self.unit)
        self.carrier.sent(output_tensor.nbytes, shards.size)
        work = shards.all_gather(output_tensor.view(shards.size, -1), input_tensor)
        under_way = Gathering(self.carrier, work, output_tensor)
        if async_op:
            return under_way
        under_way.wait()
        return None


class Sum(_Plain):
    """One unit's gradients: what it calls a ReduceScatter. `adds`: is its result added to gradients that are there already?"""

    def __init__(self, carrier: Carrier, unit: int, adds: Callable[[], bool]) -> None:
        self.carrier, self.unit, self.adds = carrier, unit, adds

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self.carrier.note(2 * self.unit + 1)
        self.carrier.reduce(output_tensor, input_tensor, now=self.adds())
        return None


class ShardWire(PlainWire):
    """A Wire by its counters alone: gradients leave unit by unit, not in buckets. See parallel/wire.py."""

    def __init__(self, carrier: Carrier) -> None:
        super().__init__(carrier.shards)
        self.traffic = carrier.traffic

    def send(self, bucket: Bucket) -> Work:
        raise AssertionError("sharded gradients are in no bucket")
