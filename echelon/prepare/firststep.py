"""The first step's self-checks, wired: watch the loss, compare divisors over ranks once, warn, and be gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from echelon.data.loader import Part
from echelon.parallel.exchange import Exchange
from echelon.prepare import selfcheck
from echelon.step import Machine


class FirstStep:
    """Lives until the first optimizer step is about to be applied; costs nothing afterwards."""

    def __init__(self, machine: Machine, exchange: Exchange, warn: Callable[[str], None]) -> None:
        self.machine, self.exchange, self.warn = machine, exchange, warn
        self.watch = selfcheck.LossWatch(self._saw)
        self.seen: list[tuple[selfcheck.Divisor | None, int]] = []
        self.halves_checked = False
        self.drawn: list[Tensor] = []
        self.draws: Callable[[], None] | None = None
        """Told when the first step drew random numbers, which are others on each worker."""
        self.is_mean = machine.strategy.loss == "mean"
        machine.at_first_begin.append(self._begin)
        machine.before_apply.append(self._compare)

    def _begin(self, part: Part) -> None:
        if self.is_mean:
            self.watch.begin()
        self.drawn = _generators()

    def _saw(self, loss: Tensor) -> None:
        current = self.machine.current
        part = current.part if current else None
        if part is not None and part.micro.last:
            self.seen.append((selfcheck.divisor_of(loss), part.count))

    def _compare(self, optimizer: Any) -> None:
        """All ranks tell each other the divisor of the first loss and how many samples it was for."""
        self.machine.before_apply.remove(self._compare)
        if self.draws is not None and self.drawn and not all(map(torch.equal, self.drawn, _generators())):
            self.draws()
        self.drawn = []
        if not self.watch.active:
            return
        self.end()
        divisor, count = self.seen[0] if self.seen else (None, 0)
        mine = [divisor.value, float(count), float(divisor.is_sum)] if divisor else [0.0, 0.0, 0.0]
        every = self.exchange.every(mine)
        verdict = selfcheck.judge([e[0] for e in every], [e[1] for e in every], any(e[2] for e in every))
        if verdict and self.machine.rank == 0:
            self.warn(selfcheck.biased(*verdict, divisor.what if divisor else ""))

    def end(self) -> None:
        self.watch.end()

    def skip(self) -> None:
        """Some workers have done it, and some will not: nobody does it any more."""
        self.end()
        self.halves_checked, self.drawn = True, []
        if self._compare in self.machine.before_apply:
            self.machine.before_apply.remove(self._compare)

    def check_halves(self, loss_fn: Callable[[Any, Any], Tensor], output: Any, target: Any) -> None:
        """run.step's own check, on this rank alone."""
        if self.halves_checked or not self.is_mean:
            return
        self.halves_checked = True
        found = selfcheck.halves_agree(loss_fn, output, target)
        if found:
            self.warn(selfcheck.not_a_mean(*found))


def _generators() -> list[Tensor]:
    """Where torch's generators stand, on the CPU and on a GPU that is in use."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
