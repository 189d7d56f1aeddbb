"""Which updates did not happen, once a worker is lost: told by the servers, decided by the workers, each of them alike. Pure.

A step that some servers have made and others not did not happen. Where several optimizers step in one iteration of a script, a lost
iteration goes back to where it began: updates name it (before.py), so a server that made one of them, or two, or none, comes to the same
version as the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from echelon.errors import WorldError


class Counted(Protocol):
    """A shard.Shard, as far as it is looked at here."""

    updates: int

    @property
    def open(self) -> tuple[int, int] | None: ...


class Holding(Protocol):
    """A copies.Copy."""

    @property
    def shard(self) -> Counted: ...


def standing(held: Mapping[int, Holding]) -> dict[str, Any]:
    """What a server tells of its models: updates so far; and where they belong to an iteration, which one and how many of them do."""
    since = {str(model): list(copy.shard.open) for model, copy in held.items() if copy.shard.open is not None}
    told = {"updates": {str(model): copy.shard.updates for model, copy in held.items()}}
    return {**told, "since": since} if since else told


def targets(told: Sequence[Mapping[str, Any]], void: int | None) -> dict[str, int]:
    """From what every server told: the updates that each model has on all of them from now on. `void` is the iteration that is lost."""
    everywhere = [model for model in told[0]["updates"] if all(model in one["updates"] for one in told)]
    return {model: min(_without(void, one, model) for one in told) for model in everywhere}


def _without(void: int | None, told: Mapping[str, Any], model: str) -> int:
    """A model's updates on one server, less those of the lost iteration."""
    since, of_it = told.get("since", {}).get(model, (None, 0))
    return int(told["updates"][model]) - (int(of_it) if void is not None and since == void else 0)


def needed(copy: Holding, updates: int, what: str) -> bool:
    """Has this server to undo something to be at this number of updates? WorldError if it cannot come there."""
    shard = copy.shard
    if shard.updates == updates:
        return False
    if shard.updates - (shard.open[1] if shard.open is not None else 1) != updates:
        raise WorldError(f"{what} is at update {shard.updates}, others at {updates}")
    return True
