"""Push and pull as a GradSync (apply=server): gradients leave for the servers during backward, the servers run the optimizer.

Buckets, weights, groups of micro-steps and the tail are those of all-reduce; what differs:

1. a full bucket is pushed, in pieces to the servers that hold its parameters; the tail alone goes around among the workers
2. `.grad` holds no numbers (elsewhere.py); a push is provisional: a further backward takes it back, adds and pushes again,
   zero_grad takes it back
3. apply(): every worker asks every server for the step; all get the new values, with the answer or behind the next forward
   (arriving.py)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from echelon.clock import Deadline
from echelon.comm.group import Group, Met, Outcome, Work
from echelon.errors import LinkLost, PeerLost
from echelon.parallel import backward, tail
from echelon.parallel.allreduce import MEETING_LIMIT_S, AllReduceSync
from echelon.parallel.arriving import Arrivals
from echelon.parallel.buckets import Bucket, Rooms, Slot
from echelon.parallel.elsewhere import OnServers, by_factor, check_held
from echelon.parallel.gradsync import Groups, Share
from echelon.parallel.wire import PlainWire
from echelon.ps.held import Call, Held
from echelon.ps.shared import Shared
from echelon.ps.worker import Servers, lost


class PushWire(PlainWire):
    """See wire.Wire: the tail's bucket goes around; the others are pushed by PushSync."""

    codes = True

    def __init__(self, group: Group, rooms: Rooms) -> None:
        super().__init__(group)
        self.rooms = rooms


class PushSync(AllReduceSync):
    """See GradSync."""

    applies_here, undoes = False, True
    made = 1
    """Updates that the last step brought: with backup it may be none, or several."""

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter, bool]],
        group: Group,
        servers: Servers,
        model: int,
        **sizes: int,
    ) -> None:
        check_held(params)
        self.model = model
        self.shared = Shared(servers, group)
        self.held = Held(servers, model, [(name, p) for name, p, _ in reversed(params)], group.rank)
        self.pushed: dict[int, list[tuple[int, int, Call]]] = {}
        """Bucket -> its pushes that have not been used."""
        self.filled: set[int] = set()
        """Slots that hold a gradient since their last step."""
        self.changed: set[int] = set()
        """Buckets whose content differs from what was pushed."""
        self.ours: set[int] = set()
        """Those among them of which nothing is on the servers."""
        self.there: set[int] = set()
        """Slots whose gradient, as it is here, is on the servers and has not been used."""
        self.stepped: dict[int, float] = {}
        """Slot -> the factor that its gradient was stepped with: it stays, so multiplied, until somebody zeroes it."""
        self.versions: dict[int, int] = {}
        self.factors: dict[int, float] = {}
        """Slot -> what clipping multiplies its gradient with in the next step."""
        self.failed: Outcome | None = None
        self.ahead: int | None = None
        """The iteration of which parameters here have seen a step: see undone()."""
        self.arrivals = Arrivals(self.held, {name: p for name, p, _ in params}, self._waited)
        super().__init__(params, group, wire=PushWire(group, self.shared), **sizes)
        self.order = None
        for slot in self.slots:
            backward.pre_hook(slot.param, partial(self._make_way, slot))
        self.held.open()
        self._note_versions()

    # -- building --------------------------------------------------------------------------------------------------

    def build(self, ordered: list[Slot]) -> None:
        before = self.shared.turn()
        super().build(ordered)
        self.shared.free(before)  # nothing of it is under way: see refresh()
        self._plan()

    def _plan(self) -> None:
        self.runs = []
        self.ours.clear()
        for bucket in self.buckets:
            origin = bucket.flat.storage_offset()
            starts = [int(s.view.storage_offset() - origin) for s in bucket.slots if s.view is not None]
            self.runs.append(self.held.runs([s.name for s in bucket.slots], starts))

    def refresh(self) -> None:
        if not self.filled and not self.pushed:
            super().refresh()

    def _thaw(self) -> None:
        before = len(self.buckets)
        super()._thaw()
        if len(self.buckets) > before:
            for index, bucket in enumerate(self.buckets):
                bucket.index = index
            self._plan()

    # -- a backward ------------------------------------------------------------------------------------------------

    def _in_place(self) -> bool:
        return False

    def begin(self, share: Share) -> None:
        if self.open:
            self.open = False
            self._reset()
        self.share = share
        self.met_in_micro = False

    def _make_way(self, slot: Slot, grad: Tensor) -> None:
        """Autograd would add to what stands in .grad."""
        if isinstance(slot.param.grad, OnServers):
            slot.param.grad = None

    def _write(self, slot: Slot, param: Tensor, grad: Tensor, share: Share) -> None:
        """The one pass over a gradient: into its bucket, on top of what is there since the last step."""
        bucket, view = slot.bucket, slot.view
        assert bucket is not None
        assert view is not None
        param.grad = None
        first, slot.fired = not slot.fired, True
        if share.counts or slot.pending is not None or slot.sealed is not None:
            self._reclaim(bucket)
            self._stay(slot)
            weight = share.weight * share.closing
            if slot.index not in self.filled:
                view.zero_() if not share.counts else view.copy_(grad).mul_(weight)
            elif share.counts:
                view.add_(grad, alpha=weight)
            self.filled.add(slot.index)
            self._add_held(slot)
        if first:
            bucket.missing -= 1
            if bucket.missing == 0:
                self._leave()

    def _reclaim(self, bucket: Bucket) -> None:
        """The bucket's memory is ours again, if it was pushed, and differs from what the servers have."""
        if bucket.index in self.ours:  # asked once a slot, and a bucket may have thousands
            return
        self.ours.add(bucket.index)
        self.there.difference_update(s.index for s in bucket.slots)
        pushes = self.pushed.pop(bucket.index, None)
        if pushes:
            self._safely(lambda: self.held.take_back(pushes))
        self.changed.add(bucket.index)

    def _leave(self) -> None:
        """Full buckets leave at once, in any order: servers wait for nobody's."""
        for bucket in self.buckets:
            if bucket.missing == 0 and bucket.index in self.changed and bucket.tail is None:
                self._push(bucket)
        if all(s.fired for s in self.active) and not any(s.param.requires_grad for s in self.spare):
            self._tell()  # before finish(), so that nobody who is in another model's meeting is waited for

    def _tell(self, late: bool = False) -> Work:
        """The tail goes around among the workers."""
        carrier = next(b for b in self.buckets if b.tail is not None)
        if carrier.work is None:
            used = [float(s.index in self.filled) for s in self.slots]
            place = tail.place(self.share.number, self.saves())
            tail.write(self.tail, place, late, self.stop_wanted(), used)
            carrier.work = self.wire.send(carrier)
        return carrier.work

    def _push(self, bucket: Bucket) -> None:
        for slot in bucket.slots:
            if slot.index not in self.filled and slot.view is not None:
                slot.view.zero_()
        self._reclaim(bucket)
        for slot in bucket.slots:
            self._stay(slot)
        self.changed.discard(bucket.index)
        self.ours.discard(bucket.index)
        self.there.update(s.index for s in bucket.slots)
        flat = bucket.flat if bucket.flat.device.type == "cpu" else bucket.flat.cpu()
        pushes = self._safely(lambda: self.held.push(flat, self.runs[bucket.index]))
        self.pushed[bucket.index] = pushes or []

    def _stay(self, slot: Slot) -> None:
        """As in torch, a gradient outlives its step: as it was stepped with."""
        factor = self.stepped.pop(slot.index, 1.0)
        if factor != 1.0 and slot.index in self.filled and slot.view is not None:
            slot.view.mul_(factor)

    def _bring(self, slots: Iterable[Slot]) -> None:
        """What was used by a step and is stepped on again goes to the servers again."""
        for bucket in {
            s.bucket.index: s.bucket for s in slots if s.bucket and s.index not in self.there
        }.values():
            self._push(bucket)

    def _safely(self, act: Any) -> Any:
        """A server or a worker that is gone is a value until the step."""
        try:
            return act()
        except (LinkLost, PeerLost) as error:
            self.failed = self.failed or lost(error)
            return None

    # -- the end of a backward -------------------------------------------------------------------------------------

    def finish(self) -> None:
        if not self.open and (self.met_in_micro or not self.share.last):
            return
        late, self.open = not self.open, True
        self._thaw()
        self._collect()
        for bucket in self.buckets:
            never = bucket.index not in self.pushed and bucket.tail is None
            if bucket.index in self.changed or never:
                self._push(bucket)
        began = time.perf_counter()
        outcome = self._tell(late).wait(Deadline.after(MEETING_LIMIT_S))
        if isinstance(outcome, Met):
            outcome = self.failed or self.arrivals.never or outcome
        if isinstance(outcome, Met):
            self._hand_back()
        self._met(outcome, time.perf_counter() - began)
        self._reset()

    def _collect(self) -> None:
        """What did not come through a hook: earlier micro-steps of the group, gradients that the script set itself."""
        for slot in self.slots:
            grad = slot.param.grad
            if slot.pending is not None or slot.sealed is not None:
                self._add_rest(slot)
            elif grad is not None and not isinstance(grad, OnServers) and slot.view is not None:
                self._write(slot, slot.param, grad.detach(), self.share)

    def _add_rest(self, slot: Slot) -> None:
        """What earlier micro-steps of the group left, in a slot that got nothing in the last one."""
        if slot.bucket is not None and slot.view is not None:
            self._reclaim(slot.bucket)
            if slot.index not in self.filled:
                slot.view.zero_()
            self.filled.add(slot.index)
            self._add_held(slot)

    def _hand_back(self) -> None:
        self._look_around()
        for slot, used in zip(self.slots, tail.used(self.tail), strict=True):
            slot.param.grad = OnServers.of(slot.name, slot.param) if used > 0 else None

    # -- the script's verbs ----------------------------------------------------------------------------------------

    def withdraw(self, params: Iterable[Tensor]) -> None:
        for slot in self._mine(params):
            slot.pending = None
            self.factors.pop(slot.index, None)
            self.stepped.pop(slot.index, None)
            if isinstance(slot.param.grad, OnServers):
                slot.param.grad = None
            if slot.index in self.filled:
                self.filled.discard(slot.index)
                if slot.bucket is not None:
                    self._reclaim(slot.bucket)

    def drain(self) -> None:
        self.arrivals.settle()

    def _waited(self, seconds: float) -> None:
        self.wait_s += seconds

    def forget(self) -> None:
        self.arrivals.settle()
        for bucket in self.buckets:
            self._reclaim(bucket)
        self.filled.clear()
        self.factors.clear()
        self.stepped.clear()
        self.failed = None
        super().forget()

    def rejoin(self, brings: bool) -> None:
        """After Servers.enter(): this worker was there before, and its parameters are those after the last commit. One of those
        workers brings them to the servers; it must be done before anybody steps or pulls."""
        self.arrivals.settle()
        self.arrivals.check()
        self.failed = None
        self.pushed.clear()
        self.held.bring() if brings else self.held.gather()
        self._note_versions()

    def undo(self, since: int) -> None:
        if self.ahead == since:
            self.held.void(since)
            self.undone(since)

    def undone(self, since: int) -> None:
        if self.ahead == since:
            self.held.follow()
            self.held.pull()
            self._note_versions()
            self.ahead = None

    # -- the step --------------------------------------------------------------------------------------------------

    def squares(self, params: Iterable[Tensor]) -> tuple[float, bool]:
        """The sum of squares of the global gradient of these, and whether it is finite. Every worker calls it."""
        self.arrivals.settle()
        mine = [s for s in self._mine(params) if s.param.grad is not None]
        self._bring(mine)
        found, finite = self.held.squares([s.name for s in mine]) if mine else ([], True)
        squares = zip(found, mine, strict=True)
        scaled = [x * self.factors.get(s.index, 1.0) ** 2 for of, s in squares for x in of]
        return math.fsum(scaled), finite

    @property
    def suspects(self) -> list[tuple[int, str]]:
        """Whose parts were not finite when squares() was asked last, and in which parameter."""
        return self.held.suspects

    def clip(self, params: Iterable[Tensor], factor: float) -> None:
        """The next step of these uses `factor` times their gradients."""
        for slot in self._mine(params):
            self.factors[slot.index] = self.factors.get(slot.index, 1.0) * factor

    def apply(self, optimizer: int, groups: Groups, since: int | None = None) -> Outcome:
        """The optimizer's step on the servers; these parameters have their new values when it returns Met, or when somebody looks."""
        self.arrivals.settle()
        if self.arrivals.never is not None:
            return self.arrivals.never
        self._upload_changes()
        self._bring(s for _, params in groups for s in self._mine(params) if s.param.grad is not None)
        stepping, unused = by_factor(
            [(recipe, self._mine(params)) for recipe, params in groups], self.factors
        )
        hidden = not self.arrivals.why_not()
        began = time.perf_counter()
        try:
            self.held.apply(optimizer, stepping, unused, values=not hidden, since=since)
        except (LinkLost, PeerLost) as error:
            return lost(error)
        finally:
            self.wait_s += time.perf_counter() - began
        self.ahead, numbers = since, {s.name: s.index for s in self.slots}
        for _, factor, names in stepping:
            self.stepped.update((numbers[name], factor) for name in names if factor != 1.0)
        for _, params in groups:
            self.there.difference_update(s.index for s in self._mine(params))
        for index in [i for i, pushes in self.pushed.items() if all(p.done for _, _, p in pushes)]:
            del self.pushed[index]
        # another optimizer's are still there, ours are used: pushed anew next time
        self.changed |= self.pushed.keys()
        self.arrivals.stepped(hidden, self._note_versions)
        return Met()

    def _note_versions(self) -> None:
        self.versions = {s.index: s.param._version for s in self.slots}

    def _upload_changes(self) -> None:
        """The script wrote into parameters itself (load_state_dict, clamping): the servers go on from there."""
        self.held.follow()
        if self._brings():
            told = any(s.param._version != self.versions[s.index] for s in self.slots)
            if told or self.held.edited():
                self.held.bring()

    def _brings(self) -> bool:
        """Is it this worker whose own changes count?"""
        return self.group.rank == 0

    def state(self, optimizer: int, params: Iterable[Tensor]) -> dict[int, dict[str, Tensor]]:
        """By the parameter's id: its optimizer's state, fetched from the servers."""
        mine = self._mine(params)
        found = self.held.state(optimizer, [s.name for s in mine])
        return {id(s.param): found[s.name] for s in mine if s.name in found}

    def load(self, optimizer: int, groups: Groups, state: Any) -> None:
        """Parameters and the optimizer's state as they are here become the servers'. Every worker calls it; worker 0's count."""
        named = [(recipe, [s.name for s in self._mine(params)]) for recipe, params in groups]
        self.arrivals.settle()
        names = {s.name: s.param for s in self.slots}
        kept = {name: dict(state.get(p, {})) for name, p in names.items()}
        self.held.load(optimizer, named, kept)
        self._note_versions()
