"""What a rank sends in a step under each form, counted from sizes alone: pure.

An operation of a group counts as the bytes that have to reach other ranks, dealt evenly among its ranks, whichever way it takes:
a ring sends just that. What servers are pushed and what is pulled from them counts in full, both ways."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Verb = Literal["all_reduce", "reduce_scatter", "reduce", "all_gather", "gather", "scatter", "broadcast", "barrier"]  # fmt: skip


def factor(verb: Verb, ranks: int) -> float:
    """What a rank sends for each byte of one rank's part (all_gather: its x; reduce_scatter: its out; else the tensor that every rank
    has)."""
    others = ranks - 1
    if verb == "barrier":
        return 0.0
    if verb in ("all_gather", "reduce_scatter"):
        return float(others)
    return (2 if verb == "all_reduce" else 1) * others / ranks


def all_reduced(nbytes: float, ranks: int) -> float:
    return nbytes * factor("all_reduce", ranks)


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """One model under `sharded`, in bytes: how large, and among whom."""

    level: int
    split: int
    """Parameters that are dealt (level 1) or split."""
    outermost: int = 0
    """Those of them that level 3 keeps from forward to backward: they are needed again at once."""
    ranks: int
    copies: int = 1
    """How many times the model is there: `shard_workers`."""
    micros: int = 1
    """Forwards and backwards of a step."""


def sharded(model: Sharded) -> float:
    """1: gradients are summed, new values sent to all. 2: gathered in each forward, gradients summed in parts. 3: gathered again for each
    backward. Where there are copies, parts of gradients are summed among them."""
    once = model.split * (model.ranks - 1) / model.ranks
    if model.level == 1:
        return 2 * once + once
    again = (model.split - model.outermost) * (model.ranks - 1) / model.ranks if model.level == 3 else 0.0
    among = all_reduced(model.split / model.ranks, model.copies)
    return model.micros * (2 * once + again + among)


def pushed(gradients: int, values: int) -> float:
    """Servers that step: every gradient goes there, every new value comes back."""
    return float(gradients + values)


def summed(gradients: int, share: float, ranks: int) -> float:
    """Servers that sum `share` of the gradients, there and back, while the workers sum the rest."""
    return 2 * share * gradients + all_reduced((1 - share) * gradients, ranks)


@dataclass(frozen=True)
class Crossing:
    """A value that goes from one stage of a pipeline to another, for one micro-batch."""

    source: int
    target: int
    nbytes: int
    back: bool
    """Its gradient comes back."""


def piped(crossings: Iterable[Crossing], places: Sequence[int], place: int, micros: float) -> float:
    """What a worker at `place` sends for `micros` micro-batches. `places` says where each stage lies: values between two stages of one
    worker do not travel."""
    return micros * sum(
        c.nbytes * ((places[c.source] == place) + (c.back and places[c.target] == place))
        for c in crossings
        if places[c.source] != places[c.target]
    )
