"""A word a step among all ranks, where gradients meet among fewer: a step is made everywhere or nowhere, and all stop at one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from echelon.clock import Deadline
from echelon.comm.group import Group, Lost, Met, Outcome
from echelon.parallel.gradsync import GradSync

LIMIT_S = 1800.0


class Word:
    """One tiny all-reduce a step. Every rank calls it in the same order."""

    def __init__(self, everyone: Group, device: torch.device) -> None:
        self.group = everyone
        self._told = torch.zeros(2, device=device)

    def step(self, outcome: Outcome, syncs: Sequence[GradSync]) -> Outcome:
        """What all ranks together make of a step: lost if it was lost for anybody. If some rank was asked to stop, all know now."""
        told = self._told
        told[0] = float(isinstance(outcome, Lost))
        told[1] = float(any(sync.stop_seen or sync.stop_wanted() for sync in syncs))
        met = self.group.all_reduce(told, "max").wait(Deadline.after(LIMIT_S))
        if isinstance(met, Lost):
            self._told = torch.zeros_like(told)  # the lost operation may still write to the old one
            return outcome if isinstance(outcome, Lost) else met
        lost, stop = told.tolist()
        for sync in syncs:
            sync.stop_seen = stop > 0
        if lost and isinstance(outcome, Met):
            return Lost((), "other workers lost a peer in this step")
        return outcome
