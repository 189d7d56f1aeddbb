"""Which span of which tensor lies on a rank: the key under which all state is kept, from the first day.

Data-parallel training holds every tensor whole, so every span is the whole; forms that split the model say with `Placed` what
of each tensor is where.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Key:
    """One tensor of a run's state: a parameter's full name and a slot ("value", "exp_avg", "ema", …)."""

    name: str
    slot: str = "value"


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of the flattened tensor with this global shape."""

    shape: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Span:
        return cls(shape, 0, math.prod(shape))

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def runs(self) -> tuple[Runs, ...]:
        return (Runs(self.start, self.stop - self.start),)


@dataclass(frozen=True)
class Runs:
    """Elements at regular places of a flattened tensor: `count` runs of `length`, each `period` after the one before.

    One run is a stretch of the tensor. Columns [a, b) of a matrix with c columns and r rows are Runs(a, b - a, c, r). Rows of each
    of three matrices that are packed into one are three runs."""

    start: int
    length: int
    period: int = 0
    count: int = 1

    @property
    def numel(self) -> int:
        return self.length * self.count


@dataclass(frozen=True)
class Placed:
    """How one tensor of a model lies on this rank. A tensor for which there is none lies whole on every rank."""

    shape: tuple[int, ...]
    """Of the whole tensor, as the user made it."""

    runs: tuple[Runs, ...]
    """What is here, in the order of the elements of the tensor here; () where nothing is."""

    copies: tuple[int, ...]
    """The ranks of the run that hold the very same elements, this one included."""

    counts: bool = True
    """Sums over all elements of the model (a gradient's norm) are taken over the ranks of one replica, each of which adds
    what counts: of elements that several of them hold, one rank's."""

    @property
    def numel(self) -> int:
        """Elements that are here."""
        return sum(run.numel for run in self.runs)


class Stateful(Protocol):
    """Anything that can be put back: tracked objects, schedulers, scalers."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...
