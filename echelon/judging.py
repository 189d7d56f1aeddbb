"""Steps whose gradient may not be finite (nonfinite=skip, refuse): who is asked, and what follows from the verdict.

Where gradients meet on the workers, `.grad` is the same everywhere, so each asks itself. Where servers hold them and all workers are at one
place, the servers are asked before the step. Where workers are not at one place, the servers judge, and tell with their answers (heed).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from echelon import away, verdict
from echelon.clock import Deadline
from echelon.comm.group import Met
from echelon.events import UpdateSkipped
from echelon.loop import Stepping
from echelon.parallel import finite
from echelon.parallel.allreduce import AllReduceSync
from echelon.parallel.local import local
from echelon.parallel.sharded.parted import PartedSync
from echelon.parallel.sharded.sync import ShardedSync
from echelon.parallel.stale import StaleSync
from echelon.verdict import Make, Refuse, Skip, Suspect, Verdict

if TYPE_CHECKING:
    from echelon.step import Machine

ASK_S = 60.0


def may_step(machine: Machine, optimizer: Stepping) -> bool:
    """Is this update made? If not, it was counted and told; NotFinite where the strategy refuses it. A scaler that is at work has judged
    already."""
    rule = machine.strategy.nonfinite
    if machine.scaler_judges or any(isinstance(sync, StaleSync) for sync in optimizer.syncs):
        return True
    there = optimizer.elsewhere
    if there:
        asked = [away.squares(machine, sync, optimizer.params()) for sync in there]
        suspects = [Suspect(*told) for sync in there for told in sync.suspects]
        ok = everywhere(machine, optimizer, all(ok for _, ok in asked))
        found = verdict.verdict(rule, ok, suspects)
    else:
        found = _here(machine, optimizer)
    if isinstance(found, Refuse):
        raise verdict.error(found, machine.next_step(optimizer), machine.rank)
    if isinstance(found, Make):
        return True
    if machine.rank == 0 or machine.strategy.update == "local":
        tell(machine, machine.next_step(optimizer), found)
    return False


def _here(machine: Machine, optimizer: Stepping) -> Verdict:
    rule, held = machine.strategy.nonfinite, [p for p in optimizer.params() if p.grad is not None]
    ok = finite.finite([local(p.grad) for p in held if p.grad is not None])
    if everywhere(machine, optimizer, ok):
        for watch in machine.watches.values():
            watch.clear()
        return Make()
    names = {id(slot.param): slot.name for sync in _syncs(optimizer) for slot in sync.slots}
    wrong = {id(held[i]) for i in finite.broken(local(p.grad) for p in held if p.grad is not None)}
    wrong_names = [names.get(id(p), "") for p in _wrong(machine, optimizer, wrong)]
    ranks = _whose(machine, optimizer)
    return verdict.verdict(
        rule, False, [Suspect(rank, name) for rank in ranks or [-1] for name in wrong_names]
    )


def everywhere(machine: Machine, optimizer: Stepping, ok: bool) -> bool:
    """Do all ranks that hold the model together find theirs finite? PeerLost when one of them is gone."""
    params = optimizer.params()
    if machine.split.over(params) is None:
        return ok
    flag = torch.tensor([float(ok)], device=local(params[0]).device)
    return bool(machine.split.meet(flag, "min").item())


def _wrong(machine: Machine, optimizer: Stepping, wrong: set[int]) -> list[Tensor]:
    """The parameters whose gradients are not finite, here or on a rank that has another part."""
    params = optimizer.params()
    if machine.split.over(params) is not None:
        flags = torch.tensor([float(id(p) in wrong) for p in params], device=local(params[0]).device)
        wrong = {
            id(p) for p, flag in zip(params, machine.split.meet(flags, "max").tolist(), strict=True) if flag
        }
    return [p for p in params if id(p) in wrong]


def _whose(machine: Machine, optimizer: Stepping) -> list[int]:
    """Every rank is here, since all saw the same gradient: they tell each other whose parts were not finite, if that ends the run."""
    group = _syncs(optimizer)[0].group
    if group.local:
        return [machine.rank]
    if machine.strategy.nonfinite != "refuse":
        return []
    mine = [machine.watches[id(sync)] for sync in optimizer.syncs if id(sync) in machine.watches]
    flags = torch.zeros(group.size, device=optimizer.params()[0].device)
    flags[group.rank] = float(any(watch.broken() for watch in mine))
    outcome = group.all_reduce(flags).wait(Deadline.after(ASK_S))
    return [int(r) for r in flags.nonzero().view(-1)] if isinstance(outcome, Met) else []


def _syncs(optimizer: Stepping) -> list[AllReduceSync | ShardedSync | PartedSync]:
    return [sync for sync in optimizer.syncs if isinstance(sync, (AllReduceSync, ShardedSync, PartedSync))]


def skip(machine: Machine, optimizer: Stepping) -> None:
    """The step counts, and nothing was moved by it. What compress held back of it is taken back."""
    for sync in optimizer.syncs:
        if sync.applies_here:
            sync.withdraw(optimizer.params())
    optimizer.optimizer._opt_called = True  # type: ignore[attr-defined]
    if optimizer.elsewhere:
        away.kept_since(machine, optimizer)
    machine.count(optimizer)
    for update in machine.after_apply:
        update(optimizer)


def heed(machine: Machine) -> None:
    """What servers said of updates since the last time: tells of those that were skipped. Raises NotFinite for one that was refused."""
    for sync in machine.syncs:
        if not isinstance(sync, StaleSync):
            continue
        notes, sync.notes = sync.notes, []
        for note in notes:
            step = machine.counters.global_step - note.behind
            if isinstance(note.found, Refuse):
                raise verdict.error(note.found, step, machine.rank)
            if isinstance(note.found, Skip) and note.mine:
                tell(machine, step, note.found)


def heed_copy(machine: Machine, found: Verdict) -> None:
    """What was decided about this worker's copy of the weights, before it would have met the others'."""
    if isinstance(found, Refuse):
        raise verdict.error(found, machine.counters.global_step, machine.rank)
    if isinstance(found, Skip):
        tell(machine, machine.counters.global_step, found)


def tell(machine: Machine, step: int, found: Skip) -> None:
    machine.counters.skipped += 1
    if machine.counters.skipped == 1:
        machine.warn(
            f"step {step} was skipped: {found.reason}.\n"
            "  nonfinite=skip leaves such updates out; the end of the run says how many they were."
        )
    told = UpdateSkipped(rank=machine.rank, step=step, reason=found.reason, total=machine.counters.skipped)
    machine.emit(told)
