"""All-reduce as a GradSync: gradients leave in buckets during backward and are global when it returns.

A meeting is one outermost backward:

1. ready: a hook writes each gradient, times its weight, into its bucket (the one pass over it); a full bucket leaves
2. fill: at the end, buckets that some unused parameter held back leave with zeros; the tail says who used what
3. meet: wait for each bucket in the order in which it left
4. hand back: `.grad` becomes the bucket's view, or stays None where no rank had a gradient

In the middle of a group (accumulate, microbatches) nothing meets: gradients are banked in their slots and `.grad` is
None, so code between backward and step does no harm there. A group of one rank leaves gradients where autograd put them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echelon.clock import Deadline
from echelon.comm.group import Group, Met, Outcome, merge
from echelon.parallel import backward, buckets, places, tail
from echelon.parallel.buckets import MIB, Slot
from echelon.parallel.gradsync import Share
from echelon.parallel.hooks import Hooks
from echelon.parallel.sparse import meet_rows
from echelon.parallel.wire import PlainWire, Wire

MEETING_LIMIT_S = 1800.0
IDLE_STEPS = 100
"""A parameter that was frozen for this many steps leaves the buckets."""


class AllReduceSync:
    """See GradSync. `params` are (full name, parameter, is its gradient sparse)."""

    applies_here = True

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter, bool]],
        group: Group,
        *,
        bucket_bytes: int = 25 * MIB,
        first_bucket_bytes: int = MIB,
        wire: Wire | None = None,
    ) -> None:
        self.wire = wire or PlainWire(group)
        self.group, self.bucket_bytes, self.first_bucket_bytes = group, bucket_bytes, first_bucket_bytes
        self.share = Share(weight=1.0 / group.size)
        self.on_met: Callable[[float], None] | None = None
        """Told at the end of each meeting how long it waited."""
        self.on_uneven: Callable[[], None] | None = None
        """Told when some ranks had a backward in a micro-step and others none."""
        self.outcomes: list[Outcome] = []
        self.wait_s, self.activity, self.meetings = 0.0, 0, 0
        self.met_in_micro = self.open = self.banked = self.stop_seen = False
        self.stop_wanted: Callable[[], bool] = lambda: False
        """Was this rank asked to stop? Every rank hears of it in the next meeting (`stop_seen`)."""
        self.saves: Callable[[], int] = lambda: 0
        """How often the script asked for a checkpoint: the same on all ranks, or they are told."""
        self.later = tail.Later()
        self.order: list[int] | None = []
        """The order in which gradients came so far; None once the buckets follow it."""
        self.slots = [Slot(i, name, p, sparse) for i, (name, p, sparse) in enumerate(params)]
        self.by_param = {id(s.param): s for s in self.slots}
        self.hooks = Hooks(self.slots, self._ready, self._before)
        self.build([s for s in reversed(self.slots) if s.param.requires_grad])

    # -- building ------------------------------------------------------------------------------------------------

    def build(self, ordered: list[Slot]) -> None:
        """Buckets over these slots; the others are frozen and wait in `spare`."""
        chosen = {s.index for s in ordered}
        for slot in self.slots:
            slot.bucket, slot.view = None, slot.view if slot.index in chosen else None
        self.active = ordered
        self.buckets: list[buckets.Bucket] = []  # the old ones go as their gradients move into new ones
        self.buckets, self.tail = buckets.build(
            ordered,
            self.wire.rooms,
            first_bytes=self.first_bucket_bytes,
            bucket_bytes=self.bucket_bytes,
            tail_numel=tail.HEAD + len(self.slots),
            coded=self.wire.codes,
        )
        self.wire.build(self.buckets)
        self.spare = [s for s in self.slots if s.index not in chosen]
        self.sparse = [s for s in self.slots if s.sparse and s.index in chosen]
        self._reset()

    def _reset(self) -> None:
        for bucket in self.buckets:
            bucket.missing, bucket.work, bucket.again = len(bucket.slots), None, False
        for slot in self.slots:
            slot.fired = slot.stacked = slot.counted = False
        self.next_bucket = 0
        self.wire.forget()

    def refresh(self) -> None:
        for slot in self.active:
            slot.idle = 0 if slot.param.requires_grad else slot.idle + 1
        thawed = [s for s in self.spare if s.param.requires_grad]
        kept = [s for s in self.active if s.idle <= IDLE_STEPS]
        if thawed or len(kept) < len(self.active):
            self.build([*kept, *reversed(thawed)])

    def _thaw(self) -> None:
        """Parameters thawed since the step began get buckets of their own until the next one."""
        thawed = [s for s in self.spare if s.param.requires_grad]
        if thawed:
            self.active = [*self.active, *thawed]
            self.spare = [s for s in self.spare if not s.param.requires_grad]
            self.sparse += [s for s in thawed if s.sparse]
            self.buckets += buckets.lay([s for s in thawed if not s.sparse], self.wire.rooms, self.wire.codes)

    # -- a micro-step --------------------------------------------------------------------------------------------

    def begin(self, share: Share) -> None:
        if self.open:  # a backward raised before its end: what it left is of no use
            self.open = False
            self._reset()
        self.share = share
        self.met_in_micro = False
        seen = self.hooks.follow(share, self._in_place)
        self.activity, self.banked = self.activity + seen, self.banked or seen > 0

    def _before(self, slot: Slot, grad: Tensor) -> Tensor | None:
        """A backward on top of a global gradient, where weights do not sum to one (groups, loss=sum).

        Autograd is about to add in place, so the new gradient is scaled first, and the sum is then taken with 1 / size.
        """
        if slot.param.grad is None or not self.share.last:
            return None
        slot.stacked = True
        if not self.share.counts:
            return torch.zeros_like(grad)
        return grad * (self.share.weight * self.share.closing * self.group.size)

    def _ready(self, slot: Slot, param: Tensor) -> None:
        grad, share = param.grad, self.share
        if grad is None:
            return
        self.activity += 1
        if grad.requires_grad:
            grad = grad.detach()
        if not share.last:
            if share.counts:
                slot.bank(grad, share.weight)
                self.banked = True
            param.grad = None
            return
        self.open = True
        backward.at_end(self.finish)
        if self._in_place() or (slot.bucket is None and not slot.sparse):
            return  # nothing to do, or thawed a moment ago: see _thaw and _fill
        if slot.sparse:
            slot.fired, slot.counted = True, share.counts
            return
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        self._write(slot, param, grad, share)

    def _in_place(self) -> bool:
        """One rank, one micro-step: `.grad` is global where it is."""
        share = self.share
        return self.group.local and not self.banked and share.counts and share.weight * share.closing == 1.0

    def _write(self, slot: Slot, param: Tensor, grad: Tensor, share: Share) -> None:
        """ready: the one pass over a gradient. `.grad` is None until the meeting is over, so a second one adds."""
        bucket, view = slot.bucket, slot.view
        assert bucket is not None
        assert view is not None
        weight = share.weight * share.closing
        param.grad = None
        if bucket.work is not None:
            late = grad.mul(weight) if share.counts else torch.zeros_like(view)
            slot.late = late if slot.late is None else slot.late.add_(late)
            bucket.again = True
            return
        if slot.fired:
            if share.counts:
                view.add_(grad, alpha=weight)
            return
        if slot.stacked:
            view.mul_(1.0 / self.group.size)
        elif not share.counts:
            view.zero_()
        elif grad.data_ptr() == view.data_ptr():
            view.mul_(weight)  # an earlier backward's global gradient is in it: all ranks' weights sum to one
        elif share.closing == 1.0 and (held := slot.held()) is not None:
            torch.add(held, grad, alpha=weight, out=view)  # with what the group held here: one pass for both
        else:
            torch.mul(grad, weight, out=view)
        slot.fired, slot.counted = True, share.counts
        if slot.pending is not None or slot.sealed is not None:
            self._add_held(slot)
            slot.counted = True
        if self.order is not None:
            self.order.append(slot.index)
        bucket.missing -= 1
        if bucket.missing == 0:
            self._leave()

    def _add_held(self, slot: Slot) -> None:
        held = slot.held()
        if held is not None and slot.view is not None:
            slot.view.add_(held, alpha=self.share.closing)

    def _leave(self) -> None:
        """Buckets leave in one order everywhere, each as soon as it and all before it are full."""
        while self.next_bucket < len(self.buckets) and self.buckets[self.next_bucket].missing == 0:
            bucket = self.buckets[self.next_bucket]
            if bucket.tail is not None:
                if not all(s.fired for s in self.active) or any(s.param.requires_grad for s in self.spare):
                    return  # the tail must tell of all of them, of those thawed a moment ago too
                self._write_tail()
            bucket.work = self.wire.send(bucket)
            self.next_bucket += 1

    def _write_tail(self, held: Iterable[Slot] = (), late: bool = False) -> None:
        """Where we are, and which parameters have a gradient here that counts."""
        holding = {id(s) for s in held}
        used = [float(s.counted or s.param.grad is not None or id(s) in holding) for s in self.slots]
        tail.write(self.tail, tail.place(self.share.number, self.saves()), late, self.stop_wanted(), used)

    # -- the end of a backward -----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Ends the open meeting; with none open, takes part in one if this micro-step had none here."""
        if not self.open and (self.met_in_micro or not self.share.last):
            return
        late, self.open = not self.open, True
        deadline = Deadline.after(MEETING_LIMIT_S)
        if self._in_place():
            self.stop_seen = self.stop_seen or self.stop_wanted()
            self._met(self.group.barrier().wait(deadline), 0.0)
            return
        self._thaw()
        # fill
        self._fill([s for s in self.slots if s.pending is not None or s.sealed is not None], late)
        # meet
        began = time.perf_counter()
        outcomes = [b.work.wait(deadline) for b in self.buckets if b.work is not None]
        if any(b.again for b in self.buckets):
            outcomes += self._second_round(deadline)
        outcomes += meet_rows(self.sparse, self.share, self.group, deadline)
        outcome = merge(outcomes)
        waited = time.perf_counter() - began
        # hand back
        if isinstance(outcome, Met):
            self._hand_back()
        self._met(outcome, waited)
        self._reset()

    def _met(self, outcome: Outcome, waited: float) -> None:
        self.outcomes.append(outcome)
        self.meetings += 1
        self.met_in_micro, self.open = True, False
        self.wait_s += waited
        if self.on_met is not None:
            self.on_met(waited)

    def _fill(self, held: list[Slot], late: bool) -> None:
        """fill: what has no gradient of this backward gets its content, then every bucket left leaves."""
        for bucket in self.buckets[self.next_bucket :]:
            for slot in bucket.slots:
                if slot.fired:
                    continue
                view, param = slot.view, slot.param
                assert view is not None
                if param.grad is None:
                    view.zero_()
                elif param.grad.data_ptr() == view.data_ptr():
                    view.mul_(1.0 / self.group.size)  # global already: an earlier backward's
                elif self.share.counts:
                    torch.mul(param.grad, self.share.weight * self.share.closing, out=view)  # the script's
                else:
                    view.zero_()
            bucket.missing = 0
        for slot in held:
            if not slot.sparse and slot.bucket is not None and slot.bucket.work is None:
                self._add_held(slot)
        if self.next_bucket < len(self.buckets):
            self._write_tail(held, late)
            for bucket in self.buckets[self.next_bucket :]:
                bucket.work = self.wire.send(bucket)
            self.next_bucket = len(self.buckets)

    def _second_round(self, deadline: Deadline) -> list[Outcome]:
        """Buckets that got gradients after they had left meet again; what they hold is global already."""
        outcomes: list[Outcome] = []
        for bucket in self.buckets:
            if not bucket.again:
                continue
            bucket.flat.mul_(1.0 / self.group.size)
            for slot in bucket.slots:
                if slot.late is not None and slot.view is not None:
                    slot.view.add_(slot.late)
                    slot.late = None
            outcomes.append(self.wire.send(bucket).wait(deadline))
        return outcomes

    def _hand_back(self) -> None:
        self.hooks.handed_back(self.share)
        dense = [s for s in self.active if not s.sparse]
        plain = all(s.fired for s in dense) and self.share.counts
        self._look_around()
        if plain:
            for slot in dense:
                slot.param.grad = slot.view
            return
        used = tail.used(self.tail)
        for slot in dense:
            slot.param.grad = slot.view if used[slot.index] > 0 else None
        self.wire.withdraw([s for s in dense if used[s.index] == 0])

    def _look_around(self) -> None:
        """Are all ranks in the same micro-step, and did all have a backward in it?"""
        if self.tail.device.type != "cpu":  # reading it now would wait for the GPU
            before = self.later.swap(self.tail)
            self.stop_seen = self.stop_seen or (before is not None and before.some_stop)
            return
        head = tail.head(self.tail)
        self.stop_seen = self.stop_seen or head.some_stop
        if not head.same_place:
            raise tail.misplaced(self.group, self.share.number, self.saves(), Deadline.after(MEETING_LIMIT_S))
        if head.some_late and self.on_uneven is not None:
            self.on_uneven()

    # -- the script's verbs --------------------------------------------------------------------------------------

    def holds(self, params: set[int]) -> bool:
        return any(i in params for i in self.by_param)

    def unused(self) -> list[str]:
        return [s.name for s in self.slots if s.param.requires_grad and s.param.grad is None]

    def _mine(self, params: Iterable[Tensor]) -> list[Slot]:
        return [self.by_param[id(p)] for p in params if id(p) in self.by_param]

    def seal(self, params: Iterable[Tensor]) -> None:
        for slot in self._mine(params):
            grad = slot.param.grad
            if grad is not None:  # the script's own, in mid-group
                slot.bank(grad.detach() * self.share.weight, 1.0)
                slot.param.grad, self.banked = None, True
            slot.seal()

    def withdraw(self, params: Iterable[Tensor]) -> None:
        mine = self._mine(params)
        for slot in mine:
            slot.pending = None
        self.wire.withdraw(mine)

    def applied(self, params: Iterable[Tensor]) -> None:
        self.wire.applied(self._mine(params))

    def commit(self, step: int) -> Outcome:
        outcomes, self.outcomes = self.outcomes, []
        return merge(outcomes)

    def holding(self) -> bool:
        return self.banked and any(s.pending is not None or s.sealed is not None for s in self.slots)

    def settled(self) -> None:
        self.banked = self.holding()
        if self.order is not None and self.meetings and not self.group.local:
            places.learn(self, Deadline.after(MEETING_LIMIT_S))

    def drain(self) -> None:
        pass

    fresh = drain

    def lost(self) -> Outcome:
        return merge(self.outcomes)

    def layout(self) -> dict[str, Any]:
        return places.layout(self)

    def lay(self, layout: dict[str, Any]) -> None:
        places.lay(self, layout)

    def forget(self) -> None:
        self.outcomes = []
        self.order = None if self.order is None else []
        for slot in self.slots:
            slot.pending = slot.sealed = slot.late = slot.param.grad = None
        self.hooks.look_again()
        self.open = self.banked = False
        self._reset()

    def renew(self) -> None:
        self.build(self.active)
