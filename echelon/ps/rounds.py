"""local: every worker takes k steps on its own, then the parameters meet: their mean, or DiLoCo's outer step.

A round ends when everybody who took pieces in it has delivered. Who has nothing to compute any more is not waited for,
and who is lost in mid-round leaves a mean over the others.
"""

from __future__ import annotations

from collections.abc import Mapping

from echelon.ps.dealt import Dealt
from echelon.ps.decisions import Average, Outer, Part, Rule
from echelon.ps.ledger import Ledger


class Rounds(Dealt):
    """A step is a round here; a part holds a worker's parameters after up to `local_steps` batches, and counts for its
    samples."""

    def __init__(
        self,
        members: Mapping[int, int],
        ledger: Ledger,
        local_steps: int,
        rule: Average | Outer,
        *,
        version: int = 0,
    ) -> None:
        super().__init__(members, ledger, most=local_steps, version=version)
        self.rule = rule

    def _may_take(self, worker: int) -> str:
        if any(part.worker == worker for part in self.here):
            return f"round {self.version} waits for {self._missing()}"
        return ""

    def _complete(self) -> str:
        if self.granted or (self.ledger.waiting and self._missing()):
            return ""
        return f"the parts of all {len(self.here)} workers of round {self.version} are here"

    def _rule(self, parts: tuple[Part, ...]) -> Rule:
        return self.rule

    def _missing(self) -> list[int]:
        return sorted(self.members.keys() - {part.worker for part in self.here})
