"""Who is in the run: a pure state, changed by what happened, each change with its term and its reason.

The term starts at 1. Ranks that take their seat for the first time form the run and leave the term alone, so that
all who form it agree on it; every other change (a death, a failure, an end, a return) raises it by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from echelon.control.roster import DEAD, FAILED, JOINED, LEFT
from echelon.errors import UsageError


@dataclass(frozen=True)
class Change:
    """One line of the journal: what became of one rank, and the term from which that holds."""

    term: int
    rank: int
    state: str
    reason: str
    host: str = ""
    pid: int = 0
    incarnation: int = 0
    step: int = 0
    code: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "member", **asdict(self)}


def read_change(record: Mapping[str, Any]) -> Change:
    """A change as the journal holds it."""
    return Change(**{key: value for key, value in record.items() if key != "kind"})


@dataclass(frozen=True)
class Membership:
    """The ranks of a run of `num_workers`, as of `term`."""

    num_workers: int
    term: int = 1
    seats: Mapping[int, Change] = field(default_factory=dict)

    @property
    def ended(self) -> frozenset[int]:
        """Ranks that will not report any more."""
        return frozenset(rank for rank, seat in self.seats.items() if seat.state != JOINED)

    @property
    def awaited(self) -> frozenset[int]:
        """Ranks that are at work or still to come."""
        return frozenset(range(self.num_workers)) - self.ended

    def lost_since(self, term: int) -> tuple[int, ...]:
        """Ranks that died or failed after `term`: nothing of that term can wait for them any more."""
        gone = (
            rank for rank, seat in self.seats.items() if seat.state in (DEAD, FAILED) and seat.term > term
        )
        return tuple(sorted(gone))


def join(now: Membership, rank: int, host: str, pid: int, incarnation: int) -> Change | None:
    """A rank takes its seat; None when it already sits there (its connection was made anew)."""
    if not 0 <= rank < now.num_workers:
        raise UsageError(f"rank {rank} cannot join a run of {now.num_workers} workers")
    seat = now.seats.get(rank)
    if seat is None:
        num_joined = len(now.seats) + 1
        reason = f"rank {rank} joined on {host} ({num_joined} of {now.num_workers})"
        return Change(now.term, rank, JOINED, reason, host, pid, incarnation)
    if (seat.pid, seat.incarnation) == (pid, incarnation) and seat.host == host and seat.state == JOINED:
        return None
    if incarnation < seat.incarnation:
        raise UsageError(f"incarnation {incarnation} of rank {rank} was replaced by {seat.incarnation}")
    return Change(now.term + 1, rank, JOINED, f"rank {rank} came back on {host}", host, pid, incarnation)


def leave(now: Membership, rank: int, step: int, code: int) -> Change | None:
    """A rank says that its script is over, with its exit code; None when its seat is empty already."""
    seat = now.seats.get(rank)
    if seat is None or seat.state != JOINED:
        return None
    how = "came to its end" if code == 0 else f"failed with exit code {code}"
    state = LEFT if code == 0 else FAILED
    return replace(
        seat, term=now.term + 1, state=state, step=step, code=code, reason=f"rank {rank} {how} at step {step}"
    )


def died(now: Membership, rank: int, code: int, step: int = 0) -> Change | None:
    """A rank's process is over, as its supervisor saw; None when the rank had said so itself."""
    if not 0 <= rank < now.num_workers:
        raise UsageError(f"rank {rank} is not in a run of {now.num_workers} workers")
    how = f"signal {code - 128}" if code > 128 else f"exit code {code}"
    seat = now.seats.get(rank)
    if seat is None:
        return Change(now.term + 1, rank, DEAD, f"rank {rank} ended ({how}) before it joined", code=code)
    if seat.state != JOINED:
        return None
    reason = f"rank {rank} on {seat.host} (pid {seat.pid}) ended without a word ({how}) after step {step}"
    return replace(seat, term=now.term + 1, state=DEAD, code=code, step=step, reason=reason)


def apply(now: Membership, change: Change) -> Membership:
    """The membership after `change`. Changes of an older term are refused: there is one history."""
    if change.term < now.term:
        raise UsageError(f"a change of term {change.term} came in term {now.term}")
    return replace(now, term=change.term, seats={**now.seats, change.rank: change})
