"""A worker that was killed is started again: for which forms, and when the others may go on with it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echelon.control.roster import DEAD, FAILED, LEFT

Seats = Mapping[int, Mapping[str, Any]]
"""The coordinator's roster of workers: rank -> state, term, incarnation, …"""


@dataclass(frozen=True)
class Wait:
    """Somebody is still to come."""

    reason: str


@dataclass(frozen=True)
class Meet:
    """All seats are taken. `term` is the last change among the workers' seats: whoever reads the same roster gets the same one."""

    term: int
    incarnations: tuple[int, ...]
    """By rank: who sits there."""


@dataclass(frozen=True)
class Never:
    """The run cannot become whole any more."""

    reason: str
    peers: tuple[int, ...]


def why_not(fields: Mapping[str, Any], others: int) -> str:
    """Why a killed worker of a run with these strategy fields and so many `others` is not started again; "" when it is.

    Asked by the supervisors and by the workers, which must decide alike.
    """
    served = fields.get("form", "allreduce") == "ps"
    if served and fields.get("update", "sync") != "sync":
        return f"update={fields['update']} has no common step to go back to"
    if served and any(int(fields.get(name, 0) or 0) for name in ("backup", "aggregate")):
        return "where the first parts make a step there is no common one to go back to"
    if not served or fields.get("apply", "worker") != "server":
        return "the workers hold the weights, and a step may have been applied on some of them only"
    if fields.get("backend", "auto") not in ("auto", "native"):
        return f"groups of backend={fields.get('backend')} cannot be made anew"
    if not others:
        return "nobody is left who knows how far the run was"
    return ""


def standing(seats: Seats, num_workers: int, known: tuple[int, ...], tried: int = 0) -> Wait | Meet | Never:
    """Can the workers come together anew? `known` are the incarnations that this one last acted with (() when it is new itself),
    `tried` the last term in which that was begun. Asked again whenever the roster may have changed."""
    over = tuple(rank for rank, seat in seats.items() if seat["state"] in (LEFT, FAILED))
    if over:
        how = "came to its end" if seats[over[0]]["state"] == LEFT else "failed"
        return Never(f"worker {over[0]} {how}, and the run cannot become whole any more", over)
    dead = [rank for rank, seat in seats.items() if seat["state"] == DEAD]
    missing = [rank for rank in range(num_workers) if rank not in seats]
    if dead or missing:
        return Wait(f"worker {(dead or missing)[0]} is started again")
    term = max(int(seat["term"]) for seat in seats.values())
    found = tuple(int(seats[rank]["incarnation"]) for rank in range(num_workers))
    if found == known or term <= tried:
        return Wait("the coordinator has not heard of it yet")
    return Meet(term, found)
