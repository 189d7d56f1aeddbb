"""Levels 2 and 3 as a GradSync: torch's fully_shard gathers parameters and reduces gradients; this weighs them, and tells the ranks' word.

A meeting is one outermost backward:

1. reduce: as each unit's backward is over, its gradients leave, weighted; parameters without one leave zeros, so that sizes agree
2. drain: what is still under way
3. tell: one small all-reduce: where we are, whether to stop, who used what
4. hand back: `.grad` is this rank's part of the global gradient (a DTensor), or None where no rank had one

In the middle of a group (accumulate, microbatches) the reduced parts are banked and `.grad` is None, as under all-reduce.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from echelon.comm.group import Group, Lost, Outcome, merge
from echelon.errors import UsageError
from echelon.parallel.gradsync import Share
from echelon.parallel.local import local
from echelon.parallel.sharded.carry import Carrier, Gather, ShardWire, Sum
from echelon.parallel.sharded.split import groups_of
from echelon.parallel.sharded.telling import Telling


class Piece:
    """One parameter: `held` is fully_shard's own record of it."""

    __slots__ = ("before", "held", "index", "name", "pending", "pending_used", "sealed", "sealed_used", "seen", "used")  # fmt: skip

    def __init__(self, index: int, name: str, held: Any) -> None:
        self.index, self.name, self.held = index, name, held
        self.seen = False
        """Its unit's backward was over at least once in the meeting that is open."""
        self.before = False
        """It had a gradient before that."""
        self.used = False
        """It got one that counts, here."""
        self.pending: Tensor | None = None
        """Its reduced part of earlier micro-steps of the group, provisional."""
        self.sealed: Tensor | None = None
        self.pending_used = self.sealed_used = False

    @property
    def param(self) -> nn.Parameter:
        return self.held.sharded_param  # type: ignore[no-any-return]

    @property
    def waiting(self) -> Tensor | None:
        """The gradient that autograd left on the whole parameter."""
        whole: Any = getattr(self.held, "_unsharded_param", None)
        kept: Tensor | None = self.held.unsharded_accumulated_grad
        return kept if whole is None or whole.grad is None else whole.grad

    def bank(self, grad: Tensor, used: bool) -> None:
        self.pending = grad if self.pending is None else self.pending.add_(grad)
        self.pending_used = self.pending_used or used

    def seal(self) -> None:
        if self.pending is not None:
            self.sealed = self.pending if self.sealed is None else self.sealed.add_(self.pending)
            self.sealed_used = self.sealed_used or self.pending_used
        self.withdraw()

    def withdraw(self) -> None:
        self.pending, self.pending_used = None, False

    def drop(self) -> None:
        self.withdraw()
        self.sealed, self.sealed_used = None, False


class ShardedSync(Telling):
    """See GradSync. `units` are fully_shard's states of one model, the root's last; `group` all ranks among which gradients meet."""

    applies_here = True

    def __init__(
        self,
        units: Sequence[Any],
        names: dict[int, str],
        group: Group,
        carrier: Carrier,
        device: torch.device,
    ) -> None:
        self.units, self.carrier = list(units), carrier
        self.share = Share(weight=1.0 / group.size)
        carrier.share = lambda: self.share
        self.wire = ShardWire(carrier)
        self.on_met: Callable[[float], None] | None = None
        self.moments: Any = None
        self.outcomes: list[Outcome] = []
        self.activity = 0
        self.met_in_micro = self.open = False
        self.pieces: list[Piece] = []
        self.by_held: dict[int, Piece] = {}
        self.parts: list[tuple[Callable[[], None], list[Piece]]] = []
        """How each unit's gradients leave, and what is in it."""
        for number, unit in enumerate(self.units):
            self._take(unit, number, names)
        self.by_param = {id(p.param): p for p in self.pieces}
        super().__init__(group, len(self.pieces), device)

    def _take(self, unit: Any, number: int, names: dict[int, str]) -> None:
        unit._root_post_backward_final_callback = partial(self._end, unit._root_post_backward_final_callback)
        for part in groups_of(unit):
            mine = [
                Piece(len(self.pieces) + i, names.get(id(held.sharded_param), "?"), held)
                for i, held in enumerate(part.fsdp_params)
            ]
            self.pieces += mine
            self.by_held |= {id(p.held): p for p in mine}
            part._all_gather_comm = Gather(self.carrier, number)
            part._reduce_scatter_comm = Sum(self.carrier, number, partial(_some_grad, mine))
            part.gradient_divide_factor, part.force_sum_reduction_for_comms = 1.0, True
            part.unshard_async_op = True
            part.post_backward = partial(self._unit_over, mine, part.post_backward)
            part.pre_forward = partial(_checked, mine, part.pre_forward)
            self.parts.append((part.post_backward, mine))

    @property
    def slots(self) -> list[Piece]:
        return self.pieces

    @property
    def wait_s(self) -> float:
        return self.word_s + self.carrier.wait_s

    # -- a backward ----------------------------------------------------------------------------------------------

    def _unit_over(self, mine: list[Piece], reduce: Callable[..., None], *unused: Any) -> None:
        """reduce: a unit's gradients are there. Called again for the same unit when its module ran twice."""
        self.open = True
        for piece in mine:
            if not piece.seen:
                piece.seen, piece.before = True, piece.param.grad is not None
            whole = getattr(piece.held, "_unsharded_param", None)
            if whole is None or not whole.requires_grad:
                continue
            if piece.waiting is not None:
                self.activity += 1
                piece.used = piece.used or self.share.counts
            else:
                piece.held.unsharded_accumulated_grad = torch.zeros_like(whole)
        reduce()

    def _end(self, inner: Callable[[], None]) -> None:
        """The end of the outermost backward: fully_shard's own, then ours."""
        inner()
        for (
            again,
            mine,
        ) in self.parts:  # a module that ran twice, recomputed: gradients that came after its first turn
            if any(piece.waiting is not None for piece in mine):
                again()
        # drain
        began = time.perf_counter()
        self.carrier.drain()
        if self.share.last:
            self._meet(late=False)
        else:
            self._bank()
        if self.on_met is not None:
            self.on_met(time.perf_counter() - began)

    def _bank(self) -> None:
        for piece in self.pieces:
            grad = piece.param.grad
            if piece.seen and grad is not None:
                piece.bank(grad._local_tensor, piece.used)  # type: ignore[attr-defined]
                piece.param.grad = None
        self._reset()

    def _reset(self) -> None:
        self.open = False
        for piece in self.pieces:
            piece.seen = piece.before = piece.used = False

    def _meet(self, late: bool) -> None:
        """tell and hand back. `.grad` is what this backward and those before it in the step brought, and what the group held."""
        for piece in self.pieces:
            piece.seal()
            if not piece.seen:
                piece.before = piece.param.grad is not None
        # tell
        outcome, used = self.tell(
            self.share.number,
            late,
            [p.used or p.before or p.sealed_used for p in self.pieces],
            self.carrier.trace,
        )
        self.outcomes.append(outcome)
        self.met_in_micro = True
        # hand back
        if not isinstance(outcome, Lost):
            self._hand_back(used)
        self._reset()

    def _hand_back(self, used: list[float]) -> None:
        for piece, times in zip(self.pieces, used, strict=True):
            param, held = piece.param, piece.sealed
            piece.sealed, piece.sealed_used = None, False
            if times == 0:
                param.grad = None
            elif held is not None and param.grad is not None:
                param.grad._local_tensor.add_(held, alpha=self.share.closing)  # type: ignore[attr-defined]
            elif held is not None:
                param.grad = piece.held.to_sharded_dtensor(held.mul_(self.share.closing))

    # -- a micro-step --------------------------------------------------------------------------------------------

    def begin(self, share: Share) -> None:
        if self.open:  # a backward raised before its end: what it left is of no use
            self._give_up()
        self.share = share
        self.met_in_micro = False

    def finish(self) -> None:
        """The backstop. A backward that torch's hooks did not see (an output changed in place) is ended here."""
        if self.met_in_micro or not self.share.last:
            return
        if any(piece.waiting is not None for piece in self.pieces):
            self.units[-1]._root_post_backward_final_callback()
            return
        self._meet(late=True)

    # -- the script's verbs --------------------------------------------------------------------------------------

    def holds(self, params: set[int]) -> bool:
        return any(i in params for i in self.by_param)

    def unused(self) -> list[str]:
        return [p.name for p in self.pieces if p.param.requires_grad and p.param.grad is None]

    def _mine(self, params: Iterable[Tensor]) -> list[Piece]:
        return [self.by_param[id(p)] for p in params if id(p) in self.by_param]

    def seal(self, params: Iterable[Tensor]) -> None:
        for piece in self._mine(params):
            piece.seal()

    def withdraw(self, params: Iterable[Tensor]) -> None:
        for piece in self._mine(params):
            piece.withdraw()

    def zero(self, set_to_none: bool) -> None:
        """model.zero_grad(): between forward and backward the model's parameters are the whole ones, whose gradients are not the step's."""
        for piece in self.pieces:
            piece.withdraw()
            if set_to_none:
                piece.param.grad = None
            elif piece.param.grad is not None:
                local(piece.param.grad).zero_()

    def applied(self, params: Iterable[Tensor]) -> None:
        pass

    def holding(self) -> bool:
        return any(p.pending is not None or p.sealed is not None for p in self.pieces)

    def commit(self, step: int) -> Outcome:
        outcomes = [*self.outcomes, *self.carrier.outcomes]
        self.outcomes, self.carrier.outcomes = [], []
        return merge(outcomes)

    def lost(self) -> Outcome:
        return merge([*self.outcomes, *self.carrier.outcomes])

    def settled(self) -> None:
        pass

    drain = fresh = refresh = settled

    def forget(self) -> None:
        self.outcomes, self.carrier.outcomes = [], []
        for piece in self.pieces:
            piece.drop()
            piece.param.grad = None
        self._give_up()

    def _give_up(self) -> None:
        """Nothing of a forward or backward that did not come to its end is left: parameters are in parts again."""
        self.carrier.drain()
        for piece in self.pieces:
            piece.held.unsharded_accumulated_grad = None
            if hasattr(piece.held, "_unsharded_param"):
                piece.held._unsharded_param.grad = None
        root = self.units[-1]
        if root._is_root:
            root._reset_iter_state()
        self._reset()

    def reshard(self) -> None:
        """Whole parameters that a forward left behind are freed: the next one gathers them as they are then."""
        for unit in self.units:
            for part in groups_of(unit):
                part.reshard()

    def layout(self) -> dict[str, Any]:
        return {}

    def lay(self, layout: dict[str, Any]) -> None:
        pass

    def renew(self) -> None:
        pass


def _some_grad(pieces: list[Piece]) -> bool:
    """Is a unit's reduced gradient read at once: added to one that is there, or shown to a hook?"""
    return any(
        p.param.grad is not None or getattr(p.param, "_post_accumulate_grad_hooks", None) for p in pieces
    )


def _checked(mine: list[Piece], inner: Callable[..., Any], *args: Any) -> Any:
    """A unit's forward begins. What torch would pass over in silence is refused: parameters put in the place of those that are split,
    and hooks on parameters, which are never whole when gradients come."""
    for piece in mine:
        at, held = piece.held._module_info, piece.held
        found = at.module._parameters.get(at.param_name)
        if found is not held.sharded_param and found is not getattr(held, "_unsharded_param", None):
            raise UsageError(
                f"`{piece.name}` is not the parameter that was split: functional_call, or an assignment after prepare()",
                remedy="Change values in place, replace whole modules, or use level=1: there models stay whole.",
            )
        if held.sharded_param._backward_hooks:
            raise UsageError(
                f"`{piece.name}` has a hook (register_hook), which is not called where parameters are split",
                remedy="Use register_post_accumulate_grad_hook, change `.grad` after backward(), or use level=1.",
            )
    return inner(*args)
