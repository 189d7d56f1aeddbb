"""What is started again after it ended: the coordinator, within a budget. Pure; this is the one place that decides it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.control.roster import SERVER, WORKER, Who
from echelon.strategy import Strategy

MAX_RESTARTS = 5
"""In a row, each within WINDOW_S of the one before."""

WINDOW_S = 60.0


@dataclass(frozen=True)
class Again:
    """Start it again, in the same seat, as this incarnation."""

    incarnation: int
    reason: str


@dataclass(frozen=True)
class GiveUp:
    """It stays away: for a worker or server that is the end of the run."""

    reason: str


@dataclass(frozen=True)
class GoOn:
    """It stays away, and the others go on without it."""

    reason: str


def without(who: Who, code: int, strategy: Mapping[str, Any], others: int) -> GoOn | None:
    """A worker was killed: do the others go on without it? They do where they take batches by themselves (async, backup): what it had is
    dealt again. Worker 0 is the one that prints and writes, so not without it; `others` are the workers that have not ended."""
    if who.role != WORKER or who.rank == 0 or not 128 < code < 193 or others < 1:
        return None
    if not Strategy(**strategy).dealt:
        return None
    return GoOn("what it had taken is dealt to the others")


def after_end(
    who: Who, code: int, incarnation: int, strategy: Mapping[str, Any], num_servers: int = 0
) -> Again | GiveUp:
    """A worker or server of the run ended with `code` and nobody had asked it to; `incarnation` counts how often it was
    started again before, `strategy` are the run's fields. Asked on its host and on the first: both must decide alike.

    A server of which another one holds a copy is started again, to hold the copy of that one's; what else dies has taken what it held along.
    """
    if who.role == SERVER and code > 128 and Strategy(**strategy).copies(num_servers):
        return Again(incarnation + 1, "another server has a copy of what it held")
    return GiveUp(f"{who} ended (exit code {code}), and nothing has a copy of what it held")


def coordinator(ends: Sequence[float], incarnation: int) -> Again | GiveUp:
    """The coordinator ended at these times, the last just now. It holds nothing that its journal does not have."""
    in_a_row = 1
    for before, after in zip(ends[-2::-1], ends[:0:-1], strict=True):
        if after - before >= WINDOW_S:
            break
        in_a_row += 1
    if in_a_row > MAX_RESTARTS:
        return GiveUp("the coordinator ended again and again")
    return Again(incarnation + 1, "its journal has all it knew")
