"""optimizer.step(closure): every evaluation of the closure is a meeting, and all ranks see the global loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from echelon import judging
from echelon.comm.group import Lost
from echelon.errors import LoopError, UsageError
from echelon.loop import Stepping
from echelon.prepare.keep import PreImage

if TYPE_CHECKING:
    from echelon.step import Machine


class _Lost(Exception):
    pass


class _Skipped(Exception):
    pass


def step(machine: Machine, optimizer: Stepping, closure: Callable[[], Any]) -> Any:
    """optimizer.step(closure): every evaluation meets, and all ranks see the global loss (LBFGS decides by it)."""
    if not machine.share.last:
        with torch.enable_grad():
            loss = closure()
        machine.seal(optimizer)
        return loss
    if (
        isinstance(optimizer.optimizer, torch.optim.LBFGS)
        and machine.strategy.accumulate * machine.strategy.microbatches > 1
    ):
        raise UsageError(
            "LBFGS evaluates its closure several times a step, and accumulate/microbatches give it only the last part",
            remedy="Use accumulate=1 and microbatches=1 with LBFGS.",
        )
    evaluations = 0

    def evaluate() -> Any:
        nonlocal evaluations
        evaluations += 1
        loss = closure()
        outcome = machine.meet(optimizer)
        if isinstance(outcome, Lost):
            raise _Lost(outcome)
        if not machine.check(optimizer):
            raise _Skipped
        return machine.global_loss(loss)

    optimizer.keep_pre_image()
    before = PreImage(optimizer.optimizer) if machine.strategy.nonfinite == "skip" else None
    if (
        before is not None
    ):  # an optimizer that evaluates more than once has moved when it meets what is not finite
        before.keep()
    machine.before_change()
    try:
        result = optimizer.inner_step(evaluate)
    except _Lost as lost:
        machine.lose(lost.args[0], optimizer)
        return None
    except _Skipped:
        assert before is not None
        before.put_back()
        judging.skip(machine, optimizer)
        return None
    if not evaluations:
        raise LoopError("the optimizer did not call its closure")
    machine.count(optimizer)
    for update in machine.after_apply:
        update(optimizer)
    return result
