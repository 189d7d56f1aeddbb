"""The hooks of parameters through which gradients are seen: only those that are needed now, for each costs microseconds a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from echelon.parallel import backward
from echelon.parallel.buckets import Slot
from echelon.parallel.gradsync import Share

Ready = Callable[[Slot, Tensor], None]
"""A gradient lies in the parameter's `.grad`."""

Before = Callable[[Slot, Tensor], Tensor | None]
"""A gradient is about to be added to `.grad`; what this returns is added instead."""


class Hooks:
    """Of all slots of a model. `ready` is called from the beginning on."""

    def __init__(self, slots: Sequence[Slot], ready: Ready, before: Before) -> None:
        self._slots, self._ready, self._before = slots, ready, before
        self._on_ready: list[RemovableHandle] = []
        self._on_stack: list[RemovableHandle] = []
        self._weight: float | None = None
        """What gradients count for that add up unseen; None while they are looked at."""
        self._driven = False
        """Backwards are not the script's: there is one in each micro-step."""
        self._see()

    def follow(self, share: Share, in_place: Callable[[], bool]) -> int:
        """A micro-step begins. How many slots got what had added up unseen before it.

        Unseen gradients go on to add up while they count for the same, and to the end where they are global in `.grad` (`in_place`).
        """
        seen, stays = 0, False
        if self._weight is not None:
            stays = share.weight == self._weight if share.unseen else share.last and in_place()
            seen = 0 if stays else self.look_again()
        if share.unseen:
            self._driven = True
            self._watch_stacks(False)
            self._look_away(share.weight)
        elif share.last and not share.sums_to_one:
            self._watch_stacks(not stays and any(s.param.grad is not None for s in self._slots))
        return seen

    def handed_back(self, share: Share) -> None:
        """Gradients are global: a second backward of this micro-step, where the script may have one, adds to them."""
        if not share.sums_to_one and not self._driven:
            self._watch_stacks(True)

    def _watch_stacks(self, wanted: bool) -> None:
        """`before` is called, or no longer."""
        if wanted and not self._on_stack:
            self._on_stack = [backward.pre_hook(s.param, partial(self._before, s)) for s in self._slots]
        elif not wanted:
            _remove(self._on_stack)

    def _look_away(self, weight: float) -> None:
        """Gradients add up in `.grad` by themselves from now on, and count for `weight`. Not where some lie there already."""
        if self._weight is None and all(s.param.grad is None for s in self._slots):
            self._weight = weight
            _remove(self._on_ready)

    def look_again(self) -> int:
        """What added up goes to what the slots hold of earlier micro-steps, unless it is dropped first; how many have some."""
        if self._weight is None:
            return 0
        weight, self._weight, found = self._weight, None, 0
        for slot in self._slots:
            grad = slot.param.grad
            if grad is not None:
                slot.bank(grad.detach(), weight)
                slot.param.grad = None
                found += 1
        self._see()
        return found

    def _see(self) -> None:
        self._on_ready = [backward.hook(s.param, partial(self._ready, s)) for s in self._slots]


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
