"""Steps whose optimizer runs on servers, and clipping of gradients wherever they are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from echelon.comm.group import Lost, merge
from echelon.errors import PeerLost
from echelon.loop import Stepping
from echelon.parallel import clip
from echelon.parallel.gradsync import Applying, applying

if TYPE_CHECKING:
    from echelon.step import Machine


def step(machine: Machine, optimizer: Stepping) -> None:
    """The servers step; the parameters here are the new ones afterwards."""
    machine.before_change()
    groups = optimizer.groups()
    machine.asked.clear()
    since = kept_since(machine, optimizer)
    outcome = merge([sync.apply(optimizer.index, groups, since) for sync in optimizer.elsewhere])
    if isinstance(outcome, Lost):
        machine.lose(outcome, optimizer)
        return
    optimizer.optimizer.state.clear()  # what a checkpoint fetched is of an earlier step now
    machine.count(optimizer)
    made = max(sync.made for sync in optimizer.elsewhere)
    machine.counters.global_step += made - 1
    if made == 0:  # its part waits for others
        optimizer.stepped = False
        optimizer.applied -= 1
    for update in machine.after_apply:
        update(optimizer)


def kept_since(machine: Machine, optimizer: Stepping) -> int | None:
    """The iteration that servers must be able to undo, if this step is one of several of it; None where it is the only one. It is named by
    the step that it began after: the same number on every rank, also on one that was started again."""
    if optimizer.index in machine.in_iteration:
        optimizer.twice = True
    several = len(machine.optimizers) > 1 or len(optimizer.elsewhere) > 1 or optimizer.twice
    if machine.current is None or not several or not all(sync.undoes for sync in optimizer.elsewhere):
        return None
    optimizer.keep_pre_image()
    return machine.step_before if optimizer.has_pre_image() else None


def undo(machine: Machine) -> None:
    """The iteration is lost on every rank, and no server knows of it: its steps did not happen there."""
    for sync in machine.syncs:
        there = applying(sync)
        if there is not None and there.undoes:
            there.undo(machine.step_before)


def squares(machine: Machine, sync: Applying, params: Iterable[Tensor]) -> tuple[float, bool]:
    """Asks the servers, once for what is there now: whoever clips and whoever judges need the same answer."""
    params = list(params)
    about = (sync.activity, frozenset(id(p) for p in params if p.grad is not None))
    known = machine.asked.get(id(sync))
    if known is None or known[0] != about:
        known = machine.asked[id(sync)] = (about, sync.squares(params))
    return known[1]


def clip_now(machine: Machine, params: Iterable[Tensor], max_norm: float) -> Tensor:
    """clip_norm for a script: a peer that is lost in it is told to the step, which is then lost."""
    params = list(params)
    if machine.split.over(params) is None:
        return clip_norm(machine, params, max_norm)
    try:
        return clip_norm(machine, params, max_norm)
    except PeerLost as error:
        machine.side_losses.append(Lost(error.peers, error.message))
        return torch.tensor(math.nan)


def clip_norm(machine: Machine, params: Iterable[Tensor], max_norm: float) -> Tensor:
    """Clips the global gradient's norm, wherever it is; gives the norm before."""
    params = list(params)
    ids = {id(p) for p in params}
    there = [t for sync in machine.syncs if sync.holds(ids) and (t := applying(sync)) is not None]
    if not there:
        return clip.clip_norm(params, max_norm, machine.split)
    server_clips = machine.strategy.dealt or machine.strategy.update == "bounded"
    if server_clips and max_norm == machine.strategy.clip_norm:
        return torch.tensor(math.nan)  # the server clips
    split = machine.split
    asked = params if split.over(params) is None else [p for p in params if split.counts(p)]
    found = [squares(machine, sync, asked) for sync in there] if machine.share.last else []
    finite, total = all(ok for _, ok in found), math.fsum(squares for squares, _ in found)
    if split.over(params) is not None:
        total, finite = clip.split_squares(total, finite, params, split)
    norm = math.sqrt(total) if finite else math.nan
    factor = max_norm / (norm + 1e-6)
    for sync in there if not factor > 1.0 else ():
        sync.clip(params, factor)
        machine.asked.pop(id(sync), None)
    return torch.tensor(norm, dtype=params[0].dtype if params else torch.float32)
