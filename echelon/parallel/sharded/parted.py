"""Levels 2 and 3 in a pipeline, as a GradSync: a stage's replicas keep stretches of its parameters, and bring them whole when they are used.

A stage runs recorded calls, not modules, so it says itself what it is about to use (`Lending`):

1. open: parameters have their whole shapes; no values yet
2. forward: each call's units are gathered; at level 3 the ones before are freed
3. backward: whatever autograd saved of a unit gathers it again when it is wanted; when all gradients of a unit are there they leave, and
   the unit is freed
4. finish: one small word among the replicas; parameters are stretches again, `.grad` their part of the global gradient

At level 2 a unit is gathered once a step and stays until its end. Units leave in one fixed order, whatever autograd's is: all replicas send
the same messages for each micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from echelon.comm.group import Group, Lost, Outcome, merge
from echelon.parallel import backward
from echelon.parallel.gradsync import Share
from echelon.parallel.sharded.carry import Carrier, ShardWire
from echelon.parallel.sharded.flat import Laid, Slot, Unit
from echelon.parallel.sharded.telling import Telling


class PartedSync(Telling):
    """See GradSync, and Lending of pipeline/lending.py. The parameters that are laid down are whole, and equal on all ranks of `group`."""

    applies_here = True

    def __init__(
        self,
        laid: Laid,
        group: Group,
        carrier: Carrier,
        device: torch.device,
        *,
        keeps: bool,
        defers: bool,
    ) -> None:
        """`keeps`: level 2. `defers`: weights' gradients come in actions of their own, after backward."""
        self.carrier, self.keeps, self.defers = carrier, keeps, defers
        self.share = Share(weight=1.0 / group.size)
        carrier.share = lambda: self._apart
        self.wire = ShardWire(carrier)
        self.on_met: Callable[[float], None] | None = None
        self.moments: Any = None
        self.outcomes: list[Outcome] = []
        self.activity = 0
        self.met_in_micro = False
        self.stages: dict[int, list[Unit]] = {}
        self._num_units = 0
        self.slots: list[Slot] = []
        self.late: set[int] = set()
        """Units (by number) that leave only when the action is over: a parameter of theirs gets gradients from several actions."""
        for stage, parts in laid.stages.items():
            self.stages[stage] = [self._unit(params) for params in parts]
        self.units = [unit for units in self.stages.values() for unit in units]
        self.by_param = {id(slot.param): slot for slot in self.slots}
        self.late |= {u.number for u in self.units if defers or any(s.name in laid.common for s in u.slots)}
        self.of_storage = {unit.storage: unit for unit in self.units}
        self.of_slot = {slot.index: unit for unit in self.units for slot in unit.slots}
        known = {name: self.by_param[id(p)] for name, p in laid.names.items() if id(p) in self.by_param}
        self.of_name = {name: self.of_slot[slot.index] for name, slot in known.items()}
        self._needs: dict[tuple[str, ...], list[Unit]] = {}
        self._in_backward = False
        self._waiting: list[Unit] = []
        """Units of the stage whose backward runs that have not left yet, in the order in which they leave."""
        self._missing: dict[int, set[int]] = {}
        for slot in self.slots:
            backward.hook(slot.param, partial(self._ready, slot))
        super().__init__(group, len(self.slots), device)

    def _unit(self, params: Sequence[tuple[str, nn.Parameter]]) -> Unit:
        unit = Unit(self._num_units, params, len(self.slots), self.carrier)
        self._num_units += 1
        self.slots += unit.slots
        return unit

    @property
    def wait_s(self) -> float:
        return self.word_s + self.carrier.wait_s

    @property
    def _apart(self) -> Share:
        """What is sent counts by its weight alone: the group's normaliser comes when it meets."""
        share = self.share
        return Share(weight=share.weight, counts=share.counts, last=False)

    # -- what stages ask (Lending) -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step or a forward: inside, parameters are whole when they are needed."""
        try:
            for unit in self.units:
                unit.open()
            yield
        finally:
            self.carrier.drain()
            for unit in self.units:
                unit.close()

    @contextlib.contextmanager
    def forward(self, stage: int) -> Iterator[None]:
        if self.keeps:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield
        self._free()

    @contextlib.contextmanager
    def backward(self, stage: int) -> Iterator[None]:
        """Around the backward of one micro-batch."""
        self._waiting = [unit for unit in reversed(self.stages[stage]) if unit.trains]
        self._missing = {
            unit.number: {s.index for s in unit.slots if s.param.requires_grad} for unit in self._waiting
        }
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False
        if not self.defers:
            self._all_leave()
        self._free()

    @contextlib.contextmanager
    def weights(self, stage: int) -> Iterator[None]:
        """Around the gradients of weights that a backward put off."""
        self._waiting = [unit for unit in reversed(self.stages[stage]) if unit.trains]
        yield
        self._all_leave()

    def need(self, names: tuple[str, ...]) -> None:
        """A call is about to use these parameters and buffers."""
        units = self._needs.get(names)
        if units is None:
            found = {self.of_name[name].number: self.of_name[name] for name in names if name in self.of_name}
            units = self._needs[names] = [found[number] for number in sorted(found)]
        if units and not self.keeps and not self._in_backward:
            self._free(units)
        for unit in units:
            unit.gather()

    def made(self, tensors: Sequence[Tensor], names: tuple[str, ...]) -> None:
        """A script's autograd.Function may keep parameters in its context."""
        for tensor in tensors if not self.keeps else ():
            if isinstance(tensor.grad_fn, torch.autograd.function.BackwardCFunction):
                tensor.grad_fn.register_prehook(lambda grads: self.need(names))

    def _free(self, but: Sequence[Unit] = ()) -> None:
        for unit in self.units if not self.keeps else ():
            if unit.resident and unit not in but:
                unit.free()

    def _pack(self, tensor: Tensor) -> Any:
        unit = self.of_storage.get(tensor.untyped_storage()._cdata)
        return tensor if unit is None else (unit, tensor)

    def _ready(self, slot: Slot, param: Tensor) -> None:
        """autograd brought a gradient."""
        grad, unit = param.grad, self.of_slot[slot.index]
        if grad is None or not unit.opened:
            return
        param.grad = None
        self.activity += 1
        if self.share.counts:
            slot.used = True
            unit.take(slot, grad.detach())
        missing = self._missing.get(unit.number)
        if missing is not None and unit.number not in self.late:
            missing.discard(slot.index)
            self._leave_in_order()

    def _leave_in_order(self) -> None:
        while self._waiting and not self._missing[self._waiting[0].number]:
            if self._waiting[0].number in self.late:
                return
            unit = self._waiting.pop(0)
            unit.leave()
            if not self.keeps:
                unit.free()

    def _all_leave(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._missing = {}
        for unit in waiting:
            unit.leave()

    # -- a micro-step --------------------------------------------------------------------------------------------

    def begin(self, share: Share) -> None:
        self.share = share
        self.met_in_micro = False

    def finish(self) -> None:
        """Once the pipeline has run: everybody's word, and `.grad`."""
        if self.met_in_micro or not self.share.last:
            return
        self.carrier.drain()
        for unit in self.units:
            unit.seal()
        outcome, used = self.tell(
            self.share.number, False, [slot.used for slot in self.slots], self.carrier.trace
        )
        self.outcomes.append(outcome)
        self.met_in_micro = True
        if not isinstance(outcome, Lost):
            for unit in self.units:
                unit.hand_back(used, self.share.closing)
        for slot in self.slots:
            slot.used = False

    # -- the script's verbs --------------------------------------------------------------------------------------

    def holds(self, params: set[int]) -> bool:
        return any(i in params for i in self.by_param)

    def unused(self) -> list[str]:
        return [s.name for s in self.slots if s.param.requires_grad and s.param.grad is None]

    def seal(self, params: Iterable[Tensor]) -> None:
        for unit in self._mine(params):
            unit.seal()

    def withdraw(self, params: Iterable[Tensor]) -> None:
        for unit in self._mine(params):
            unit.pending = None

    def _mine(self, params: Iterable[Tensor]) -> list[Unit]:
        """A unit is sealed and withdrawn as one: run.step does so with all of a model's."""
        indices = {self.by_param[id(p)].index for p in params if id(p) in self.by_param}
        return [unit for unit in self.units if any(slot.index in indices for slot in unit.slots)]

    def applied(self, params: Iterable[Tensor]) -> None:
        pass

    def holding(self) -> bool:
        return any(unit.pending is not None or unit.sealed is not None for unit in self.units)

    def commit(self, step: int) -> Outcome:
        outcome = self.lost()
        self.outcomes, self.carrier.outcomes = [], []
        return outcome

    def lost(self) -> Outcome:
        return merge([*self.outcomes, *self.carrier.outcomes])

    def settled(self) -> None:
        pass

    drain = fresh = refresh = renew = settled

    def forget(self) -> None:
        self.carrier.drain()
        self.outcomes, self.carrier.outcomes = [], []
        for unit in self.units:
            unit.drop()
            unit.close()
        for slot in self.slots:
            slot.param.grad, slot.used = None, False

    def layout(self) -> dict[str, Any]:
        return {}

    def lay(self, layout: dict[str, Any]) -> None:
        pass


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, tuple):
        packed[0].gather()
        packed = packed[1]
    tensor: Tensor = packed
    return tensor
