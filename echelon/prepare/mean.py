"""run.mean: a loss over unequal counts with its right global normaliser, over the whole accumulation group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from echelon import activity
from echelon.errors import UsageError
from echelon.parallel.exchange import Exchange, shown_as
from echelon.step import Machine

TINY = 1e-300


class Normaliser:
    """Knows the counts of the group that is open.

    With one micro-step a step, the counts of all ranks are known in forward, and the factor undoes the share that the
    meeting will apply, so other terms may be added to the loss. In a group the counts are complete only at its last
    micro-step: until then gradients are banked as plain sums, and the meeting closes them with 1 / count.
    """

    def __init__(self, machine: Machine, exchange: Exchange) -> None:
        self.machine, self.exchange = machine, exchange
        self.counts: list[float] = []
        self.last_number = -1

    @activity.named("run.mean")
    def mean(self, total: Tensor, count: Any) -> Tensor:
        share = self.machine.share
        mine = [float(total.detach()), float(count)] if share.counts else [0.0, 0.0]
        all_total, all_count = self.exchange.total(mine)
        value = all_total / max(all_count, TINY)
        part = self.machine.current.part if self.machine.current else None
        if part is None or (part.micro.last and not self.counts):
            factor = 1.0 / (max(all_count, TINY) * share.weight) if share.counts else 0.0
            return shown_as(total, value, factor)
        if share.number == self.last_number:
            raise UsageError(
                "run.mean was called twice in one micro-step of an accumulation group, and a group has one normaliser",
                remedy="Put all of the loss into one total, or use accumulate=1 and microbatches=1.",
            )
        self.last_number = share.number
        self.counts.append(all_count)
        closing = 1.0
        if part.micro.last:
            closing, self.counts = 1.0 / max(sum(self.counts), TINY), []
        self.machine.set_share(replace(share, weight=1.0, closing=closing))
        return shown_as(total, value, 1.0)

    def forget(self) -> None:
        """The step was lost: its group begins again."""
        self.counts = []
