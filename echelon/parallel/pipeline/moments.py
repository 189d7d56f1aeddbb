"""BatchNorm's running moments in a pipeline: moved at the end of a step, in the order of micro-batches.

So they are those of one process that computes the same micro-batches one after the other, whatever the schedule, and the same
on all workers of a stage, each of which has seen some of the micro-batches only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.clock import Deadline
from echelon.comm.group import Group, Lost, Met, Outcome
from echelon.parallel import norm

_HEAD = 2
"""Micro-batch and module, before the moments."""


class Moments:
    """Of one model. `peers`: the workers that compute other micro-batches of the same stage; a group of one where there are none."""

    def __init__(self, model: nn.Module, peers: Group, device: torch.device) -> None:
        self.peers, self.device = peers, device
        self.norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        self._numbers = {id(m): number for number, m in enumerate(self.norms)}
        self._seen: list[tuple[int, _BatchNorm, Tensor, Tensor]] = []

    def forget(self) -> None:
        self._seen = []

    def note(self, micro: int, module: _BatchNorm, mean: Tensor, var: Tensor) -> None:
        self._seen.append((micro, module, mean, var))

    @torch.no_grad()
    def settle(self, deadline: Deadline) -> Outcome:
        """The running moments move. Every worker of a stage calls it, also after a lost step; blocks. Nothing moves unless Met."""
        mine, self._seen = self._seen, []
        if not self.peers.local and any(m.training for m in self.norms):
            found = self._gathered(mine, deadline)
            if isinstance(found, Lost):
                return found
            mine = found
        for _, module, mean, var in sorted(mine, key=lambda seen: seen[0]):
            norm.move_running(module, mean, var)
        return Met()

    def _gathered(
        self, mine: list[tuple[int, _BatchNorm, Tensor, Tensor]], deadline: Deadline
    ) -> list[tuple[int, _BatchNorm, Tensor, Tensor]] | Lost:
        """Everybody's. Those of one micro-batch come from one worker, in the order in which it computed them."""
        device = self.device
        counts = torch.zeros(self.peers.size, 1, dtype=torch.int64, device=device)
        outcome = self.peers.all_gather(counts, torch.tensor([len(mine)], device=device)).wait(deadline)
        if isinstance(outcome, Lost):
            return outcome
        widest = max(m.num_features for m in self.norms)
        rows = torch.zeros(int(counts.max()), _HEAD + 2 * widest, dtype=torch.float64, device=device)
        for row, (micro, module, mean, var) in zip(rows, mine, strict=False):
            row[0], row[1] = micro, self._numbers[id(module)]
            row[_HEAD:][: len(mean)] = mean
            row[_HEAD + widest :][: len(var)] = var
        every = torch.empty(self.peers.size, *rows.shape, dtype=rows.dtype, device=device)
        outcome = self.peers.all_gather(every, rows).wait(deadline)
        if isinstance(outcome, Lost):
            return outcome
        found = []
        for count, theirs in zip(counts.flatten().tolist(), every, strict=True):
            for row in theirs[:count]:
                module = self.norms[int(row[1])]
                mean, var = (row[start:][: module.num_features] for start in (_HEAD, _HEAD + widest))
                found.append((int(row[0]), module, mean, var))
        return found
