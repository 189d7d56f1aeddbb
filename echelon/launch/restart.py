"""What is started again after it ended: the coordinator, and killed workers of some forms, within a budget. Pure; this is the one
place that decides it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.control.roster import SERVER, WORKER, Who
from echelon.elastic import again
from echelon.show.lines import fold
from echelon.strategy import Strategy

MAX_RESTARTS = 5
"""In a row: of the coordinator each within WINDOW_S of the one before, of a worker without a step of the run in between."""

MAX_ANEW = 2
"""How often in a row a worker is started again that was killed before anybody met it: what kills it so early will do so again."""

WINDOW_S = 60.0


@dataclass(frozen=True)
class Again:
    """Start it again, in the same seat, as this incarnation: the same one, if nobody has met it yet."""

    incarnation: int
    reason: str


@dataclass(frozen=True)
class GiveUp:
    """It stays away: for a worker or server that is the end of the run. The reason completes "It was not started again: …"."""

    reason: str


@dataclass(frozen=True)
class GoOn:
    """It stays away, and the others go on without it."""

    reason: str


def without(who: Who, code: int, strategy: Mapping[str, Any], others: int) -> GoOn | None:
    """A worker was killed: do the others go on without it? They do where they take batches by themselves (async, backup): what it had is
    dealt again, and if it printed and wrote for all, the next one does. `others` are the workers that have not ended."""
    if who.role != WORKER or not 128 < code < 193 or others < 1:
        return None
    if not Strategy(**strategy).dealt:
        return None
    return GoOn("what it had taken is dealt to the others")


@dataclass(frozen=True)
class Known:
    """What a supervisor knows of the run when somebody ends."""

    num_workers: int = 1
    met: bool = True
    """Its script had called echelon.init: others may have met it."""
    training: bool = False
    """The first batch was given out: before that there is no place to come back to."""
    stopping: bool = False
    """Somebody asked the run to stop."""
    spoke: bool = False
    """Its script said why it ended: an exception of its own."""
    in_a_row: int = 1
    """How often it ended since the run last made a step, this time included."""


UNKNOWN = Known()


def after_end(
    who: Who,
    code: int,
    incarnation: int,
    strategy: Mapping[str, Any],
    num_servers: int = 0,
    known: Known = UNKNOWN,
) -> Again | GiveUp:
    """A worker or server of the run ended with `code` and nobody had asked it to; `incarnation` counts how often it was
    started again before, `strategy` are the run's fields. Asked on its host and on the first, where both decide alike; if they ever
    do not, the run ends.

    A server of which another one holds a copy is started again, to hold the copy of that one's; a worker, where the others know what it
    knew. What else dies has taken what it held along.
    """
    if who.role == WORKER:
        return worker(who, code, incarnation, strategy, known)
    if who.role == SERVER and code > 128 and Strategy(**strategy).copies(num_servers):
        return Again(incarnation + 1, "another server has a copy of what it held")
    return GiveUp("nothing has a copy of what it held")


def worker(
    who: Who, code: int, incarnation: int, strategy: Mapping[str, Any], known: Known
) -> Again | GiveUp:
    """A worker that was killed; one whose script raised would only raise again."""
    if known.spoke or not 128 < code < 193:
        return GiveUp(f"it ended by itself (exit code {code})")
    if not known.met and not known.stopping and strategy.get("form") == "ps" and known.in_a_row <= MAX_ANEW:
        return Again(incarnation, "nobody has met it yet")
    why_not = again.why_not(strategy, known.num_workers - 1)
    if why_not:
        return GiveUp(why_not)
    if known.stopping:
        return GiveUp("the run was stopping")
    if not known.training:
        return GiveUp("before the first batch there is no place that it could come back to")
    if known.in_a_row > MAX_RESTARTS:
        return GiveUp(f"it was killed {known.in_a_row} times without a step in between")
    return Again(incarnation + 1, "the others have its state, and the servers its parameters")


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


def words(who: Who, where: str, code: int, step: int, anew: bool = False) -> list[str]:
    """For people: it is started again; `anew`, if nobody had met it."""
    waits = "; the others wait for it" if who.role == WORKER else ""
    when = "before it met the others" if anew else f"after step {step}"
    return fold(f"{who}{where} was killed (signal {code - 128}) {when} and is started again{waits}")
