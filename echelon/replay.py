"""What follows from a lost step: everything since the last commit is undone, and its batches come again.

Where a killed worker is started again, the others also wait for it here, at their step, and give it its state (rejoin.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon import away
from echelon.comm.group import Lost
from echelon.errors import LoopError
from echelon.events import StepLost
from echelon.loop import Stepping

if TYPE_CHECKING:
    from echelon.step import Machine


def lose(machine: Machine, lost: Lost, optimizer: Stepping) -> None:
    """Nothing is applied.

    1. judge: the policy raises when a replay makes no sense
    2. undo: gradients, optimizers that had stepped in this iteration, counters, places in the data
    3. regroup: if somebody has to be waited for, everything else is put back as well, and it gets that; what servers had stepped in
       this iteration they undo then
    """
    # judge
    step = machine.next_step(optimizer)
    optimizer.stepped = False
    regroups = machine.after_loss(lost, step)
    stepped = [o for o in machine.optimizers if o.index in machine.in_iteration or o.moved]
    undo = [o for o in stepped if not o.has_pre_image()]
    if undo:
        raise LoopError(
            f"step {step} was lost after optimizer {undo[0].index} had stepped in the same iteration for the first time, "
            "and that step cannot be undone",
            remedy="Start the run again.",
            step=step,
        )
    # undo
    for sync in machine.syncs:
        sync.forget()
    for other in machine.optimizers:
        other.put_back()
    if not regroups:
        away.undo(machine)
    machine.counters.global_step = machine.step_before if machine.current is not None else step - 1
    batches = sum(loader.rewind() for loader in machine.loaders)
    if batches and not machine.open_loops:
        machine.warn(
            f"step {step} was lost after its loop had ended: its {batches} batches come first in the next loop.\n"
            "  After the last loop there is none, and they stay out."
        )
    machine.counters.lost_steps += 1
    for forget in machine.on_lost:
        forget()
    machine.iteration_lost = True
    machine.committed = False
    machine.in_iteration.clear()
    told = StepLost(rank=machine.rank, step=step, batches=batches, reason=lost.reason, peers=list(lost.peers))
    machine.emit(told)
    # regroup
    if regroups:
        put_back(machine)
        machine.regroup()


def put_back(machine: Machine) -> None:
    """A lost iteration is over: also undo what the script did in it after its step() (averages, random numbers)."""
    for sync in machine.syncs:
        sync.forget()
    for keeper in machine.keepers:
        keeper.put_back()
