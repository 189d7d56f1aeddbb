"""backup=b: an update is the mean of the first parts of a step; later ones are dropped and their pieces dealt again.

With N members the first N - b parts count. `aggregate` fixes the number instead, as SyncReplicasOptimizer's
replicas_to_aggregate does (total_num_replicas are the members): below N the rest are backup workers, above N fast workers
compute several parts of one step. Unlike there, a worker always begins on the newest parameters, so it is never late
because of a token of an older step.
"""

from __future__ import annotations

from collections.abc import Mapping

from echelon.ps.dealt import Dealt
from echelon.ps.decisions import Mean, Part, Rule
from echelon.ps.ledger import Ledger


class Quorum(Dealt):
    """An update needs `need` parts of its version; fewer only where no further one can come for it in this epoch."""

    def __init__(
        self,
        members: Mapping[int, int],
        ledger: Ledger,
        *,
        backup: int = 0,
        aggregate: int = 0,
        version: int = 0,
    ) -> None:
        super().__init__(members, ledger, version=version)
        self.backup = backup
        self.aggregate = aggregate

    @property
    def need(self) -> int:
        return self.aggregate or max(1, len(self.members) - self.backup)

    def _may_take(self, worker: int) -> str:
        if self.need <= len(self.members):
            if any(part.worker == worker for part in self.here):
                return f"its part of step {self.version} is here, {len(self.here)} of {self.need} parts are"
            return ""
        given = len(self.here) + self._computing_now()
        return "" if given < self.need else f"all {self.need} parts of step {self.version} are dealt"

    def _complete(self) -> str:
        if len(self.here) >= self.need:
            return f"the first {len(self.here)} parts of step {self.version} are here, {self.need} are needed"
        if not self.ledger.waiting and not self._computing_now():
            return (
                f"{len(self.here)} of {self.need} parts of step {self.version}: no other is left in the epoch"
            )
        return ""

    def _rule(self, parts: tuple[Part, ...]) -> Rule:
        return Mean()

    def _computing_now(self) -> int:
        """Parts under way on the newest version; those on an earlier one will be dropped."""
        return sum(grant.version == self.version for grant in self.granted.values())
