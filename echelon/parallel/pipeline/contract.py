"""What a pipeline is made of: micro-batches, stages, the ports between them, and the actions of a schedule.

A model is recorded once for each shape of its inputs (trace.py) and its operations are dealt to stages (cut.py). A stage
(stage.py) runs its part of the record. A schedule (schedule.py) is a list of actions for each rank. The runtime (runtime.py)
goes through that list: it receives what an action takes, runs it, and sends what it gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Kind = Literal["forward", "backward", "weights"]
"""`backward` gives the gradients of what a stage took, and of its weights too unless the schedule has `weights` actions, which come later."""


@dataclass(frozen=True)
class Action:
    """One thing that a rank does. `stage` counts all stages of the model: with interleaving a rank has several."""

    kind: Kind
    stage: int
    micro: int


@dataclass(frozen=True)
class MicroBatch:
    """A few samples of a worker's part of the batch."""

    args: tuple[Any, ...]
    """Positional inputs of the model."""

    kwargs: Mapping[str, Any]
    """Keyword inputs of the model."""

    target: Any
    """Second argument of the loss function."""

    weight: float
    """What its loss counts for among those of the part: its samples / the part's, or 1 where the loss is a sum."""

    counts: bool = True
    """False for a stand-in, where this worker has nothing of a micro-batch that others have: its loss and gradients are dropped."""

    rows: int | None = None
    """Those of one step with as many are alike but for their numbers; None: not known."""


@dataclass(frozen=True)
class Port:
    """A value that goes from one stage to another in forward; its gradient, if it has one, comes back the same way."""

    value: int
    """Its number in the record: the same on every rank."""

    source: int
    """The stage that makes it."""

    target: int
    """A stage that uses it. A value that several stages use goes to each of them through a port of its own."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    grad: bool
    """A gradient comes back (zeros, if the target stage made none)."""


class Stage(Protocol):
    """What one stage does. It keeps what backward needs of each micro-batch until that is done. Not for several threads."""

    index: int

    def takes(self, micro: int) -> Sequence[Port]:
        """What forward needs of earlier stages, in the order of values."""
        ...

    def gives(self, micro: int) -> Sequence[Port]:
        """What forward makes for later stages, in the order of (value, target)."""
        ...

    def forward(self, micro: int, taken: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        """`taken` by value number; the same for what it gives. The last stage also computes the loss."""
        ...

    def backward(self, micro: int, grads: Mapping[Port, Tensor]) -> Mapping[Port, Tensor]:
        """`grads` of what was given, by port; gives those of what was taken, by port. Weights' gradients go to `.grad` by autograd,
        so hooks on parameters see each of them. With `defer` they are left out, until `weights`."""
        ...

    def weights(self, micro: int) -> None:
        """The gradients of weights that backward left out."""
        ...

    def drop(self) -> None:
        """The step is lost: forgets all micro-batches."""
        ...


Before = Callable[[Action], None]
"""Called before each action: hooks of gradients must know which micro-batch they belong to."""
