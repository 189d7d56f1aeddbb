"""Who serves which shard of the parameters, and who has the other copy of it: pure.

Shard s lies on servers s and s + 1. One of the two leads it: workers talk to that one. While the other has a whole copy, it takes
over when the leader dies; every such move has a number, the epoch, and what an older epoch says is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from echelon.control.roster import partner


@dataclass(frozen=True)
class Lead:
    """One shard's."""

    rank: int
    epoch: int = 0
    copied: bool = False
    """The partner has all that the leader acknowledged."""
    lost: str = ""
    """Why nobody has it any more."""


@dataclass(frozen=True)
class Moved:
    """A shard has another leader since this epoch, or none."""

    shard: int
    lead: Lead


def first(num_servers: int) -> tuple[Lead, ...]:
    return tuple(Lead(rank) for rank in range(num_servers))


def told(leads: Sequence[Lead], shard: int, rank: int, epoch: int, copied: bool) -> tuple[Lead, ...] | None:
    """The leader says whether its partner has a whole copy. None: it does not lead any more, and must not go on."""
    lead = leads[shard]
    if (lead.rank, lead.epoch) != (rank, epoch) or lead.lost:
        return None
    return _with(leads, shard, replace(lead, copied=copied))


def fell(leads: Sequence[Lead], rank: int, reason: str) -> tuple[tuple[Lead, ...], list[Moved]]:
    """A server's process is over: what becomes of the shards that it led or had copies of."""
    found, moves = tuple(leads), []
    for shard, lead in enumerate(leads):
        if lead.lost or rank not in (shard, partner(shard, shard, len(leads))):
            continue
        if lead.rank != rank:
            found = _with(found, shard, replace(lead, copied=False))
            continue
        if lead.copied:
            after = Lead(partner(shard, rank, len(leads)), lead.epoch + 1)
        else:
            why = f"{reason}, and no other server had a whole copy of shard {shard}"
            after = replace(lead, epoch=lead.epoch + 1, lost=why)
        found = _with(found, shard, after)
        moves.append(Moved(shard, after))
    return found, moves


def to_dict(leads: Sequence[Lead]) -> dict[str, Any]:
    """For the journal."""
    return {"kind": "leads", "leads": [asdict(lead) for lead in leads]}


def read(record: Mapping[str, Any]) -> tuple[Lead, ...]:
    return tuple(Lead(**lead) for lead in record["leads"])


def _with(leads: Sequence[Lead], shard: int, lead: Lead) -> tuple[Lead, ...]:
    return (*leads[:shard], lead, *leads[shard + 1 :])
