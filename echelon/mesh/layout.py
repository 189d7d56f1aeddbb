"""Which span of which tensor lies on a rank: the key under which all state is kept, from the first day.

Data-parallel training holds every tensor whole, so every span is the whole; sharded forms will hold less.
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


class Stateful(Protocol):
    """Anything that can be put back: tracked objects, schedulers, scalers."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...
