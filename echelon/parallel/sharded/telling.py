"""What the ranks of a split model tell each other once a meeting: one small all-reduce of its own, since no bucket has a tail here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from echelon.clock import Deadline
from echelon.comm.group import Group, Lost, Outcome
from echelon.errors import LoopError
from echelon.parallel import tail

MEETING_LIMIT_S = 1800.0


class Telling:
    """The part of a GradSync that tells: where we are, whether to stop, who used what of `num_params`, and which units were gathered
    and reduced in which order."""

    def __init__(self, group: Group, num_params: int, device: torch.device) -> None:
        self.group = group
        self.on_uneven: Callable[[], None] | None = None
        self.stop_wanted: Callable[[], bool] = lambda: False
        self.saves: Callable[[], int] = lambda: 0
        self.stop_seen = False
        self.word_s = 0.0
        self._told = torch.zeros(tail.HEAD + num_params + 2, dtype=torch.float64, device=device)

    def tell(self, number: int, late: bool, used: Sequence[bool], trace: int) -> tuple[Outcome, list[float]]:
        """Blocks. How often each parameter was used over all ranks; [] when a peer was lost. LoopError when they are not at one place."""
        place, traced = tail.place(number, self.saves()), float(trace)
        bits = [*map(float, used), traced, traced * traced]
        tail.write(self._told, place, late, self.stop_wanted(), bits)
        began = time.perf_counter()
        outcome = self.group.all_reduce(self._told).wait(Deadline.after(MEETING_LIMIT_S))
        self.word_s += time.perf_counter() - began
        if isinstance(outcome, Lost):
            self._told = torch.zeros_like(self._told)  # the lost operation may still write to the old one
            return outcome, []
        self._look_around(number)
        return outcome, tail.used(self._told)[:-2]

    def _look_around(self, number: int) -> None:
        head, (trace, squares) = tail.head(self._told), self._told[-2:].tolist()
        self.stop_seen = self.stop_seen or head.some_stop
        if not head.same_place:
            raise tail.misplaced(self.group, number, self.saves(), Deadline.after(MEETING_LIMIT_S))
        if abs(head.ranks * squares - trace**2) > 0.5:
            raise LoopError(
                "the workers ran different modules, or in another order, and a sharded model is gathered module by module",
                remedy="Let every worker run the same modules in every step, use level=1, or raise wrap_mib so that the model is one unit.",
            )
        if head.some_late and self.on_uneven is not None:
            self.on_uneven()
