"""Schedulers and scalers under the machine: the same objects, with their verbs replaced on the instance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim.lr_scheduler import ReduceLROnPlateau

from echelon.comm.group import Lost
from echelon.errors import PeerLost
from echelon.parallel.gradsync import GradSync
from echelon.prepare.keep import Scaling, Schedule
from echelon.prepare.optimizer import PreparedOptimizer, prepared_optimizer
from echelon.step import Machine


def prepare_scheduler(scheduler: Any, machine: Machine, mean: Callable[[float], float]) -> None:
    """`step` advances only if the optimizer really stepped since the last time; a plateau's metric is averaged.

    Only a step() of the optimizer that was not applied (mid-group, lost, refused by a scaler) holds it back.
    """
    machine.keepers.append(Schedule(scheduler))
    inner = scheduler.step
    seen = 0
    plateau = isinstance(scheduler, ReduceLROnPlateau)

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        if machine.following():
            return None
        prepared = prepared_optimizer(scheduler.optimizer)
        if prepared is not None:
            if not prepared.stepped and prepared.applied == seen:
                return None
            seen = prepared.applied
        if plateau:
            args = (mean(float(args[0] if args else kwargs.pop("metrics"))), *args[1:])
        return inner(*args, **kwargs)

    inner_state = scheduler.state_dict

    def state_dict() -> dict[str, Any]:
        return {key: value for key, value in inner_state().items() if key not in ("step", "state_dict")}

    scheduler.step, scheduler.state_dict = step, state_dict


def prepare_scaler(scaler: Any, machine: Machine) -> None:
    """A GradScaler works on global gradients, so all ranks find the same infinities and keep the same scale.

    In mid-group, and after a lost step, unscale_, step and update do nothing.
    """
    machine.keepers.append(Scaling(scaler))
    inner_step, inner_update, inner_unscale = scaler.step, scaler.update, scaler.unscale_
    scaled: dict[int, GradSync] = {}
    """Meetings whose gradients carry the scale that update() may change."""

    def unscale_(optimizer: Any) -> None:
        prepared = prepared_optimizer(optimizer)
        if machine.share.last:
            for sync in prepared.syncs if prepared else []:
                sync.finish()
            if prepared is not None and prepared.elsewhere and scaler.is_enabled():
                _unscale_elsewhere(scaler, prepared)
            else:
                inner_unscale(optimizer)
            if prepared is not None and machine.split.over(prepared.params()) is not None:
                _found_anywhere(machine, scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"])

    def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = prepared_optimizer(optimizer)
        if prepared is None:
            return inner_step(optimizer, *args, **kwargs)
        machine.scaled = True
        if machine.following():
            return machine.step(prepared)
        if not machine.share.last:
            machine.seal(prepared)
            return None
        for sync in prepared.syncs:
            sync.finish()
            lost = sync.lost()
            if isinstance(lost, Lost):
                machine.lose(lost, prepared)
                return None
            scaled[id(sync)] = sync
        prepared.stepped = False
        machine.scaler_judges = scaler.is_enabled()
        try:
            result = inner_step(optimizer, *args, **kwargs)
        finally:
            machine.scaler_judges = False
        if not prepared.stepped and not machine.iteration_lost:
            machine.skipped(prepared)
        return result

    def update(*args: Any, **kwargs: Any) -> None:
        if machine.share.last and not machine.iteration_lost and not machine.following():
            before = scaler._scale.clone() if getattr(scaler, "_scale", None) is not None else None
            inner_update(*args, **kwargs)
            for sync in scaled.values() if before is not None else ():
                sync.wire.rescale(scaler._scale / before)
            scaled.clear()
        elif scaler.is_enabled():
            scaler._per_optimizer_states.clear()
        if machine.scaled:
            machine.scaled = False
            machine.bare_step()

    scaler.step, scaler.update, scaler.unscale_ = step, update, unscale_


def _found_anywhere(machine: Machine, found: dict[Any, torch.Tensor]) -> None:
    """What is infinite on one of the ranks that hold the model together is so for all of them. A lost peer loses the step."""
    for flag in found.values():
        try:
            machine.split.meet(flag, "max")
        except PeerLost as error:
            machine.side_losses.append(Lost(error.peers, error.message))
            flag.zero_()


def _unscale_elsewhere(scaler: Any, prepared: PreparedOptimizer) -> None:
    """What GradScaler.unscale_ does, where the gradients are on servers: they say whether all is finite, and divide in the step."""
    state = scaler._per_optimizer_states[id(prepared.optimizer)]
    if state["stage"] is not OptState.READY:
        raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
    params, finite = prepared.params(), True
    for sync in prepared.elsewhere:
        finite = sync.squares(params)[1] and finite
        sync.clip(params, 1.0 / scaler.get_scale())
    device = params[0].device
    state["found_inf_per_device"] = {device: torch.tensor(0.0 if finite else 1.0, device=device)}
    state["stage"] = OptState.UNSCALED
