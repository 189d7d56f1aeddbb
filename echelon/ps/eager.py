"""async: a worker takes a whole batch, one push is one update, nobody waits for anybody. Geo-style local training is the
same meeting with another content: how far k local steps moved the parameters, added by its share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from echelon.ps.dealt import Dealt
from echelon.ps.decisions import AddDelta, Delayed, Part, Rule
from echelon.ps.ledger import Ledger


class Eager(Dealt):
    """`compensation` and `scale_lr` make up for late gradients (decisions.Delayed); `geo` makes an update a delta."""

    takes_late = True

    def __init__(
        self,
        members: Mapping[int, int],
        ledger: Ledger,
        *,
        local_steps: int = 1,
        compensation: float = 0.0,
        scale_lr: bool = False,
        geo: Callable[[float], AddDelta] | None = None,
        version: int = 0,
    ) -> None:
        super().__init__(members, ledger, most=local_steps, kept=0, version=version)
        self.compensation = compensation
        self.scale_lr = scale_lr
        self.geo = geo

    def _may_take(self, worker: int) -> str:
        return ""

    def _complete(self) -> str:
        return "one push is one update"

    def _rule(self, parts: tuple[Part, ...]) -> Rule:
        if self.geo is not None:
            return self.geo(1.0 / max(1, len(self.members)))
        staleness = self.version - parts[0].version
        return Delayed(staleness, lr_factor(staleness) if self.scale_lr else 1.0, self.compensation)


def lr_factor(staleness: int) -> float:
    """The learning rate of a gradient that is `staleness` updates late, divided by it (Zhang et al. 2016)."""
    return 1.0 / max(1, staleness)
