"""Between the first and the last layer of a block activations are split: what enters, and random numbers of its own.

Outside, all workers of the tensor axis draw the same random numbers, and must go on doing so: a dropout mask there is one mask. Inside,
each has features or heads of its own, so it draws from a stream of its own, and the common one moves on by one number if anything was drawn.
Where a block may begin in one stage of a pipeline and end in another there is one stream, so all must have equally many features. A block in which
nothing says `dropout` and all have equally many needs no second stream: keeping two costs 40 µs.
"""

from __future__ import annotations

import weakref
import zlib
from typing import Any

import torch
from torch import Tensor

from echelon.parallel.tensor import meet
from echelon.parallel.tensor.meet import Axis


class Region:
    """One a block. Layers in front of it get what enters through `enter`; the last one ends it with `leave`."""

    def __init__(self, axis: Axis, draws: bool = True) -> None:
        self.axis, self.draws = axis, draws and axis.streams
        self._outside: Tensor | None = None
        self._pass = 0
        self._started: Tensor | None = None
        self._last: tuple[Any, Any, int, bool] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return memo.setdefault(id(self), Region(self.axis, self.draws))  # type: ignore[no-any-return]

    def enter(self, x: Tensor, training: bool) -> Tensor:
        """x for a layer in front; layers that get the same tensor share one sum in backward."""
        # one of an earlier forward may never have been left: checkpointing stops in its middle when it has what it needs
        begins = self._outside is None or self._pass != self.axis.passes
        if training and self.draws and begins and not meet.shape_only(x):
            self._fork(x)
        if self._last is not None:
            before, copied, version, grads = self._last
            known = copied()
            if (
                known is not None
                and before() is x
                and version == x._version
                and grads == torch.is_grad_enabled()
            ):
                return known  # type: ignore[no-any-return]
        made = meet.copy(x, self.axis)
        self._last = weakref.ref(x), weakref.ref(made), x._version, torch.is_grad_enabled()
        return made

    def leave(self, like: Tensor) -> None:
        """The last layer has what it needs."""
        if self._outside is None or self._started is None:
            return
        drawn = not torch.equal(_state(like), self._started)
        _restore(like, self._outside)
        if drawn:
            torch.empty(1, device=like.device).uniform_()
        self._outside = self._started = None

    def _fork(self, like: Tensor) -> None:
        self._outside, self._pass = _state(like), self.axis.passes
        seed = zlib.crc32(self._outside.numpy().tobytes()) * 1000003 + self.axis.rank + 1
        _generator(like).manual_seed(seed)
        self._started = _state(like)


def _generator(like: Tensor) -> torch.Generator:
    if like.device.type == "cuda":
        return torch.cuda.default_generators[like.device.index or 0]
    return torch.default_generator


def _state(like: Tensor) -> Tensor:
    return _generator(like).get_state()


def _restore(like: Tensor, state: Tensor) -> None:
    _generator(like).set_state(state)
