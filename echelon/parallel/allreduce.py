"""All-reduce as a GradSync: gradients leave in buckets during backward and are global when it returns.

A meeting is one outermost backward:

1. ready: a hook writes each gradient, times its weight, into its bucket (the one pass over it); a full bucket leaves
2. fill: at the end, buckets that some unused parameter held back leave with zeros; the tail says who used what
3. meet: wait for each bucket in the order in which it left
4. hand back: `.grad` becomes the bucket's view, or stays None where no rank had a gradient

In the middle of a group (accumulate, microbatches) nothing meets: gradients are banked in their slots and `.grad` is
None, so code between backward and step does no harm there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from echelon.clock import Deadline
from echelon.comm.group import Group, Met, Outcome, merge
from echelon.parallel import backward, buckets
from echelon.parallel.buckets import MIB, Slot
from echelon.parallel.gradsync import Share
from echelon.parallel.sparse import sum_rows

MEETING_LIMIT_S = 1800.0
HEAD = 2
"""Numbers in front of the used bits in the tail: ranks that took part, and meetings they count since the start."""


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
    ) -> None:
        self.group, self.bucket_bytes, self.first_bucket_bytes = group, bucket_bytes, first_bucket_bytes
        self.all_params = list(params)
        self.share = Share(weight=1.0 / group.size)
        self.on_met: Callable[[float], None] | None = None
        """Told at the end of each meeting how long it waited."""
        self.outcomes: list[Outcome] = []
        self.wait_s = 0.0
        self.activity = 0
        self.meetings = 0
        self.met_in_micro = False
        self.open = False
        self.order: list[int] | None = []
        self.pre_hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.slots: list[Slot] = []
        self._arm()

    # -- building ------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Slots, buckets and hooks over the parameters that are trained now, in reverse order of definition."""
        for hook in (*self.hooks, *self.pre_hooks):
            hook.remove()
        self.pre_hooks = []
        self.trained = [p.requires_grad for _, p, _ in self.all_params]
        live = [item for item in self.all_params if item[1].requires_grad]
        self.slots = [Slot(i, name, p, sparse) for i, (name, p, sparse) in enumerate(live)]
        self.by_param = {id(s.param): s for s in self.slots}
        self.hooks = [s.param.register_post_accumulate_grad_hook(partial(self._ready, s)) for s in self.slots]
        self.order = []
        self._build(list(reversed(self.slots)))

    def _build(self, ordered: list[Slot]) -> None:
        old = [(s, s.param.grad) for s in self.slots if s.view is not None and s.param.grad is s.view]
        self.buckets, self.tail = buckets.build(
            ordered,
            self.group,
            first_bytes=self.first_bucket_bytes,
            bucket_bytes=self.bucket_bytes,
            tail_numel=HEAD + len(self.slots),
        )
        for slot, grad in old:
            assert slot.view is not None
            slot.view.copy_(grad)
            slot.param.grad = slot.view
        self.sparse = [s for s in self.slots if s.sparse]
        self._reset()

    def _reset(self) -> None:
        for bucket in self.buckets:
            bucket.missing, bucket.work, bucket.again = len(bucket.slots), None, False
        for slot in self.slots:
            slot.fired = slot.stacked = slot.counted = False
        self.next_bucket = 0

    def refresh(self) -> None:
        if self.trained != [p.requires_grad for _, p, _ in self.all_params]:
            self._arm()

    # -- a micro-step --------------------------------------------------------------------------------------------

    def begin(self, share: Share) -> None:
        if self.open:  # a backward raised before its end: what it left is of no use
            self.open = False
            self._reset()
        self.share = share
        self.met_in_micro = False
        if not share.last and not self.pre_hooks:
            self.pre_hooks = [s.param.register_hook(partial(self._before, s)) for s in self.slots]

    def _before(self, slot: Slot, grad: Tensor) -> Tensor | None:
        """Inside a group, a backward on top of a global gradient: autograd is about to add to it in place.

        The weights of one micro-step do not sum to one there, so the new gradient is scaled first, and the sum of
        both is then taken with 1 / size.
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
                slot.bank(grad.mul(share.weight) if _shares(grad, slot.view) else grad.mul_(share.weight))
            param.grad = None
            return
        self.open = True
        backward.at_end(self.finish)
        if slot.sparse:
            slot.fired, slot.counted = True, share.counts
            return
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        self._write(slot, param, grad, share)

    def _write(self, slot: Slot, param: Tensor, grad: Tensor, share: Share) -> None:
        """ready: the one pass over a gradient. `.grad` is None until the meeting is over, so a second one adds."""
        bucket, view = slot.bucket, slot.view
        assert bucket is not None
        assert view is not None
        weight = share.weight * share.closing
        if bucket.work is not None:
            late = grad.mul(weight) if share.counts else torch.zeros_like(view)
            slot.late = late if slot.late is None else slot.late.add_(late)
            bucket.again = True
            param.grad = None
            return
        if slot.fired:
            if share.counts:
                view.add_(grad, alpha=weight)
            param.grad = None
            return
        if grad.data_ptr() == view.data_ptr() and self.pre_hooks:
            view.mul_(1.0 / self.group.size)
        elif not share.counts:
            view.zero_()
        elif grad.data_ptr() == view.data_ptr():
            view.mul_(
                weight
            )  # an earlier backward's global gradient is in it: the weights of all ranks sum to one
        else:
            torch.mul(grad, weight, out=view)
        slot.fired, slot.counted = True, share.counts
        if slot.pending is not None or slot.sealed is not None:
            self._add_held(slot)
            slot.counted = True
        param.grad = None
        if self.order is not None:
            self.order.append(slot.index)
        bucket.missing -= 1
        if bucket.missing == 0:
            self._leave()

    def _add_held(self, slot: Slot) -> None:
        held = slot.held()
        if held is not None:
            assert slot.view is not None
            slot.view.add_(held, alpha=self.share.closing)

    def _leave(self) -> None:
        """Buckets leave in one order everywhere, each as soon as it and all before it are full."""
        while self.next_bucket < len(self.buckets) and self.buckets[self.next_bucket].missing == 0:
            bucket = self.buckets[self.next_bucket]
            if bucket.tail is not None:
                if not all(s.fired for s in self.slots):
                    return
                self._write_tail()
            bucket.work = self.group.all_reduce(bucket.flat)
            self.next_bucket += 1

    def _write_tail(self, held: Iterable[Slot] = ()) -> None:
        """Who took part, and which parameters have a gradient here that counts."""
        holding = {id(s) for s in held}
        used = [float(s.counted or s.param.grad is not None or id(s) in holding) for s in self.slots]
        self.tail.copy_(torch.tensor([1.0, float(self.meetings), *used], dtype=self.tail.dtype))

    # -- the end of a backward -----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Ends the open meeting; with none open, takes part in one if this micro-step had none here."""
        if not self.open and (self.met_in_micro or not self.share.last):
            return
        self.open = True
        deadline = Deadline.after(MEETING_LIMIT_S)
        held = [s for s in self.slots if s.pending is not None or s.sealed is not None]
        # fill
        self._fill(held)
        # meet
        began = time.perf_counter()
        outcomes = [b.work.wait(deadline) for b in self.buckets if b.work is not None]
        if any(b.again for b in self.buckets):
            outcomes += self._second_round(deadline)
        outcomes += self._meet_sparse(deadline)
        waited = time.perf_counter() - began
        self.wait_s += waited
        if self.on_met is not None:
            self.on_met(waited)
        outcome = merge(outcomes)
        self.outcomes.append(outcome)
        # hand back
        if isinstance(outcome, Met):
            self._hand_back()
        self.meetings += 1
        self.met_in_micro, self.open = True, False
        self._reset()

    def _fill(self, held: list[Slot]) -> None:
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
                    torch.mul(param.grad, self.share.weight, out=view)  # the script's own
                else:
                    view.zero_()
            bucket.missing = 0
        for slot in held:
            if not slot.sparse and slot.bucket is not None and slot.bucket.work is None:
                self._add_held(slot)
        if self.next_bucket < len(self.buckets):
            self._write_tail(held)
            for bucket in self.buckets[self.next_bucket :]:
                bucket.work = self.group.all_reduce(bucket.flat)
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
            outcomes.append(self.group.all_reduce(bucket.flat).wait(deadline))
        return outcomes

    def _meet_sparse(self, deadline: Deadline) -> list[Outcome]:
        """Rows of all sparse parameters at once."""
        if not self.sparse:
            return []
        grads = [self._rows_of(slot) for slot in self.sparse]
        outcome, totals = sum_rows(grads, [s.param.detach() for s in self.sparse], self.group, deadline)
        for slot, total in zip(self.sparse, totals, strict=True):
            slot.param.grad = total
            if total is None:
                slot.fired = False
        return [outcome]

    def _rows_of(self, slot: Slot) -> Tensor | None:
        grad, share = slot.param.grad, self.share
        if grad is not None:
            grad = grad if grad.is_sparse else grad.to_sparse(1)
            if slot.stacked or not slot.fired:  # an earlier backward's, global already
                grad = grad * (1.0 / self.group.size)
            else:
                grad = grad * (share.weight * share.closing) if share.counts else None
        held = slot.held()
        if held is not None:
            grad = held * share.closing if grad is None else grad + held * share.closing
        return grad

    def _hand_back(self) -> None:
        missing = [s for s in self.slots if not s.fired and not s.sparse]
        for slot in self.slots:
            if slot.fired and not slot.sparse:
                slot.param.grad = slot.view
        if missing or not self.share.counts:
            used = self.tail[HEAD:].tolist()
            for slot in self.slots:
                if not slot.sparse:
                    slot.param.grad = slot.view if used[slot.index] > 0 else None

    def holds(self, params: set[int]) -> bool:
        return any(id(p) in params for _, p, _ in self.all_params)

    def unused(self) -> list[str]:
        """Trained parameters that have no gradient now, on any rank if the last backward met."""
        return [s.name for s in self.slots if s.param.grad is None]

    # -- the script's verbs --------------------------------------------------------------------------------------

    def _mine(self, params: Iterable[Tensor]) -> list[Slot]:
        return [self.by_param[id(p)] for p in params if id(p) in self.by_param]

    def seal(self, params: Iterable[Tensor]) -> None:
        for slot in self._mine(params):
            slot.seal()

    def withdraw(self, params: Iterable[Tensor]) -> None:
        for slot in self._mine(params):
            slot.pending = None

    def commit(self, step: int) -> Outcome:
        outcomes, self.outcomes = self.outcomes, []
        self.met_in_micro = False
        return merge(outcomes)

    def settled(self) -> None:
        if self.order:
            self._learn_order()

    def lost(self) -> Outcome:
        return merge(self.outcomes)

    def _learn_order(self) -> None:
        """After the first step: buckets in the order in which rank 0's backward made gradients."""
        assert self.order is not None
        seen = dict.fromkeys(self.order)
        ranks = [*seen, *(s.index for s in reversed(self.slots) if s.index not in seen)]
        self.order = None
        order = torch.tensor(ranks, device=self.tail.device)
        if isinstance(self.group.broadcast(order).wait(Deadline.after(MEETING_LIMIT_S)), Met):
            self._build([self.slots[i] for i in order.tolist()])

    def forget(self) -> None:
        self.outcomes = []
        self.order = None if self.order is None else []
        for slot in self.slots:
            slot.pending = slot.sealed = slot.late = slot.param.grad = None
        self.open = False
        self._reset()


def _shares(grad: Tensor, view: Tensor | None) -> bool:
    return view is not None and grad.layout is torch.strided and grad.data_ptr() == view.data_ptr()
