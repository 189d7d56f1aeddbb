"""Who is in the run: a pure state, changed by what happened, each change with its term and its reason.

Workers and servers have seats of their own: ranks count within a role. The term starts at 1. Ranks that take their seat for the first time form the run and leave the term alone, so that
all who form it agree on it; every other change (a death, a failure, an end, a return) raises it by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from echelon.control.roster import DEAD, FAILED, JOINED, LEFT, SERVER, WORKER, Who
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
    role: str = WORKER

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
    """The workers'."""
    num_servers: int = 0
    servers: Mapping[int, Change] = field(default_factory=dict)

    def seat(self, who: Who) -> Change | None:
        return (self.servers if who.role == SERVER else self.seats).get(who.rank)

    @property
    def everybody(self) -> list[Change]:
        return [*self.seats.values(), *self.servers.values()]

    @property
    def ended(self) -> frozenset[int]:
        """Workers that will not report any more."""
        return frozenset(rank for rank, seat in self.seats.items() if seat.state != JOINED)

    @property
    def awaited(self) -> frozenset[int]:
        """Workers that are at work or still to come."""
        return frozenset(range(self.num_workers)) - self.ended

    def lost_since(self, term: int) -> tuple[int, ...]:
        """Workers that died or failed after `term`: nothing of that term can wait for them any more, even if a successor has taken
        the seat. Who names no term (0) waits for whoever sits there."""
        again = {r for r, seat in self.seats.items() if 0 < term < seat.term and _is_successor(seat)}
        return tuple(sorted(again.union(_lost(self.seats, term))))

    def servers_lost_since(self, term: int) -> tuple[int, ...]:
        """The same of servers."""
        return _lost(self.servers, term)


def join(
    now: Membership, rank: int, host: str, pid: int, incarnation: int, role: str = WORKER
) -> Change | None:
    """A rank takes its seat; None when it already sits there (its connection was made anew)."""
    seats, wanted, who = _of(now, rank, role, "cannot join")
    seat = seats.get(rank)
    if seat is None:
        reason = f"{who} joined on {host} ({len(seats) + 1} of {wanted})"
        return Change(now.term, rank, JOINED, reason, host, pid, incarnation, role=role)
    if (seat.pid, seat.incarnation) == (pid, incarnation) and seat.host == host and seat.state == JOINED:
        return None
    if incarnation < seat.incarnation:
        raise UsageError(f"incarnation {incarnation} of {who} was replaced by {seat.incarnation}")
    return Change(now.term + 1, rank, JOINED, f"{who} came back on {host}", host, pid, incarnation, role=role)


def leave(now: Membership, rank: int, step: int, code: int, role: str = WORKER) -> Change | None:
    """A rank says that its script is over, with its exit code; None when its seat is empty already."""
    seats, _, who = _of(now, rank, role, "is not in")
    seat = seats.get(rank)
    if seat is None or seat.state != JOINED:
        return None
    how = "came to its end" if code == 0 else f"failed with exit code {code}"
    state = LEFT if code == 0 else FAILED
    return replace(
        seat, term=now.term + 1, state=state, step=step, code=code, reason=f"{who} {how} at step {step}"
    )


def died(now: Membership, rank: int, code: int, step: int = 0, role: str = WORKER) -> Change | None:
    """A rank's process is over, as its supervisor saw; None when the rank had said so itself."""
    seats, _, who = _of(now, rank, role, "is not in")
    how = f"signal {code - 128}" if code > 128 else f"exit code {code}"
    seat = seats.get(rank)
    if seat is None:
        reason = f"{who} ended ({how}) before it joined"
        return Change(now.term + 1, rank, DEAD, reason, code=code, role=role)
    if seat.state != JOINED:
        return None
    when = f" after step {step}" if role == WORKER else ""
    reason = f"{who} on {seat.host} (pid {seat.pid}) ended without a word ({how}){when}"
    return replace(seat, term=now.term + 1, state=DEAD, code=code, step=step, reason=reason)


def apply(now: Membership, change: Change) -> Membership:
    """The membership after `change`. Changes of an older term are refused: there is one history."""
    if change.term < now.term:
        raise UsageError(f"a change of term {change.term} came in term {now.term}")
    if change.role == SERVER:
        return replace(now, term=change.term, servers={**now.servers, change.rank: change})
    return replace(now, term=change.term, seats={**now.seats, change.rank: change})


def _of(now: Membership, rank: int, role: str, what: str) -> tuple[Mapping[int, Change], int, str]:
    """The seats of a role, how many there are, and what this one is called; UsageError when there is no such rank."""
    seats, count = (now.servers, now.num_servers) if role == SERVER else (now.seats, now.num_workers)
    name = f"server {rank}" if role == SERVER else f"rank {rank}"
    if not 0 <= rank < count:
        raise UsageError(f"{name} {what} a run of {count} {role}s")
    return seats, count, name


def _is_successor(seat: Change) -> bool:
    return seat.state == JOINED and seat.incarnation > 0


def _lost(seats: Mapping[int, Change], term: int) -> tuple[int, ...]:
    gone = (rank for rank, seat in seats.items() if seat.state in (DEAD, FAILED) and seat.term > term)
    return tuple(sorted(gone))
