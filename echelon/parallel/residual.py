"""What coding left out of the gradients so far, to be added to the next ones: error feedback.

A residual is part of the step's transaction. It follows the gradients that it belongs to:

    a meeting      changes it, and the gradients of its slots are open: on their way, not applied
    step()         applies them: the change stays
    zero_grad()    takes open ones back: their slots' residual is what it was before they met
    a lost step    puts all of it back to the last commit
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from echelon.parallel.buckets import Slot


class Residual:
    """A flat tensor with the stretches that belong to each slot (by index)."""

    def __init__(self, live: Tensor, stretches: Mapping[int, slice], in_gradient_units: bool = True) -> None:
        self.live, self.stretches, self.in_gradient_units = live, stretches, in_gradient_units
        self.kept = live.clone()
        """As it was at the last commit."""
        self.base = self.kept
        """As it was before the open gradients met; the same tensor as `kept` until something was applied since."""
        self.open: set[int] = set()
        self.moved = False
        """Some slot was applied since the last commit: its base is what lives now, once it changes again."""

    def changing(self) -> Tensor:
        """The live tensor, about to be changed by a meeting of all its slots."""
        if self.moved:
            base = self.live.clone()
            for index in self.open:
                base[self.stretches[index]] = self.base[self.stretches[index]]
            self.base, self.moved = base, False
        self.open = set(self.stretches)
        return self.live

    def applied(self, slots: Iterable[Slot]) -> None:
        done = self.open & {slot.index for slot in slots}
        self.open -= done
        self.moved = self.moved or bool(done)

    def withdraw(self, slots: Iterable[Slot]) -> None:
        for index in self.open & {slot.index for slot in slots}:
            self.live[self.stretches[index]] = self.base[self.stretches[index]]
            self.open.discard(index)

    def rescale(self, factor: Tensor) -> None:
        """Gradients come in other units from now on (a GradScaler's scale changed)."""
        if not self.in_gradient_units:
            return
        self.live.mul_(factor)
        if self.open:
            self.base = self.base * factor

    @torch.no_grad()
    def keep(self) -> None:
        self.kept.copy_(self.live)
        self._settle()

    @torch.no_grad()
    def put_back(self) -> None:
        self.live.copy_(self.kept)
        self._settle()

    def _settle(self) -> None:
        self.base, self.moved = self.kept, False
        self.open.clear()
