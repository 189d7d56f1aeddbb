"""How updates meet: one policy object for every kind. The contract, and which kind a strategy means. Pure.

ordered.py   sync, bounded   update s is the mean of all parts of global batch s, applied in order
quorum.py    backup=b        the mean of the first parts of a step; later ones are dropped and dealt again
eager.py     async, geo      one push, one update
rounds.py    local           k local steps, then the mean of the parameters, or DiLoCo's outer step
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from echelon.errors import StrategyError
from echelon.ps.decisions import AddDelta, Average, Decision, Outer, Part
from echelon.ps.eager import Eager
from echelon.ps.ledger import Ledger
from echelon.ps.ordered import Ordered
from echelon.ps.quorum import Quorum
from echelon.ps.rounds import Rounds
from echelon.strategy import Strategy


class Policy(Protocol):
    """A state machine without clock or socket: events in, decisions out, carried out by the caller in their order.

    A server and a worker use the same class: a server feeds it what arrives, a worker asks it what it may begin. Events
    come one at a time; a policy never blocks and keeps nothing but records. An event that is told twice changes nothing
    the second time.
    """

    alone: bool
    """Every server may feed its own arrivals to its own policy, and all decide alike. If False, one server decides, a
    part counts as arrived once all servers have it (versions.Arrivals), and the others carry out its Apply in order: which
    parts make an update depends on who came first, and must be the same for all ranges."""

    version: int
    """Updates applied so far."""

    def arrived(self, part: Part) -> list[Decision]:
        """A part is here."""
        ...

    def asked(self, worker: int, step: int) -> list[Decision]:
        """A worker asks for parameters to compute `step`; asking again for the same step repeats the answer, asking for a
        later one says that the part before is on its way. A Wait is followed by a Grant in
        the decisions of a later event; after a Halt or a Rollback everybody asks again."""
        ...

    def joined(self, worker: int, incarnation: int) -> list[Decision]:
        """A worker is there, or there again."""
        ...

    def lost(self, worker: int, reason: str = "lost") -> list[Decision]:
        """A worker is gone; one that leaves in good order as well."""
        ...

    def regroup(self, term: int, members: Mapping[int, int], version: int) -> list[Decision]:
        """A new term: who is in it (rank -> incarnation), and the version that all ranges have (versions.agreed)."""
        ...

    def committed(self, version: int) -> list[Decision]:
        """Every server has it (versions.Completion): nothing goes back below this version any more. Where servers keep one
        earlier version, the update after the next waits for this."""
        ...


LocalMeeting = Literal["average", "geo", "diloco"]


def policy_of(
    strategy: Strategy,
    members: Mapping[int, int],
    *,
    ledger: Ledger | None = None,
    aggregate: int = 0,
    local: LocalMeeting = "average",
    compensation: float = 0.0,
    scale_lr: bool = False,
) -> Policy:
    """The policy that a strategy means. `members` are rank -> incarnation, `aggregate` SyncReplicasOptimizer's
    replicas_to_aggregate, `compensation` and `scale_lr` for async (decisions.Delayed)."""
    if strategy.backup and strategy.update != "sync":
        raise StrategyError(
            f"backup={strategy.backup} does not go with update={strategy.update}",
            remedy="Backup workers are for update=sync: the others do not wait for late parts in the same way.",
        )
    if strategy.staleness and strategy.update != "bounded":
        raise StrategyError(
            f"staleness={strategy.staleness} does not go with update={strategy.update}",
            remedy=f"Write update=bounded,staleness={strategy.staleness}.",
        )
    if not 0 <= strategy.backup < max(1, len(members)):
        raise StrategyError(
            f"backup={strategy.backup} of {len(members)} workers leaves nobody to wait for",
            remedy="At least one worker's part must count in each step: use fewer backups or more workers.",
        )
    if strategy.update == "bounded" or (strategy.update == "sync" and not strategy.backup and not aggregate):
        return Ordered(members, staleness=strategy.staleness)
    ledger = ledger or Ledger()
    if strategy.update == "sync":
        return Quorum(members, ledger, backup=strategy.backup, aggregate=aggregate)
    if strategy.update == "async":
        return Eager(members, ledger, compensation=compensation, scale_lr=scale_lr)
    if local == "geo":
        return Eager(members, ledger, local_steps=strategy.local_steps, geo=AddDelta)
    return Rounds(members, ledger, strategy.local_steps, Outer() if local == "diloco" else Average())
