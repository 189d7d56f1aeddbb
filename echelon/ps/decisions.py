"""What a policy is told and what it answers: small frozen records, each answer with its reason.

A version is the number of updates applied; update s turns version s into version s + 1. Decisions come in a list and are
carried out in its order: an Apply before the Grants that follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Part:
    """What one worker contributes to one update."""

    worker: int
    step: int
    """The update that it is meant for; where arrival decides (async), the worker's own count."""
    version: int
    """Of the parameters that it was computed on; the lowest, if servers answered with different ones."""
    count: int = 1
    """Samples in it: its weight. 0 for a stand-in, which is waited for and not added."""
    incarnation: int = 0
    term: int = 0
    pieces: tuple[int, ...] = ()
    """The ledger's numbers of what it was computed from, where parts are dealt by the policy."""


DropKind = Literal["stale", "duplicate", "term", "incarnation", "stranger", "ahead", "foreign"]
"""stale: too late or too old. duplicate: already counted. term, incarnation: from before a change. stranger: not a
member. ahead: computed on a version that is not there. foreign: computed from what was not dealt to it."""


@dataclass(frozen=True)
class Accept:
    """The part belongs to the next update and is here now."""

    part: Part
    reason: str


@dataclass(frozen=True)
class Hold:
    """The part belongs to a later update: keep it."""

    part: Part
    reason: str


@dataclass(frozen=True)
class Drop:
    """The part is not used. `returns` are the pieces that go back to be dealt again: none where they were counted, or
    went back already."""

    part: Part
    kind: DropKind
    reason: str
    returns: tuple[int, ...] = ()


@dataclass(frozen=True)
class Mean:
    """The optimizer's step with the mean of the parts' gradients."""


@dataclass(frozen=True)
class Delayed:
    """The optimizer's step with one gradient that may be late."""

    staleness: int
    lr_factor: float = 1.0
    """Multiplies the learning rate."""
    compensation: float = 0.0
    """λ: the gradient g becomes g + λ·g·g·(now - then), where `then` is what the worker computed on (DC-ASGD)."""


@dataclass(frozen=True)
class Average:
    """The parameters become the mean of the parts' parameters."""


@dataclass(frozen=True)
class AddDelta:
    """The part is how far a worker moved its parameters: added, times `scale` (geo)."""

    scale: float


@dataclass(frozen=True)
class Outer:
    """The outer gradient, old parameters minus the mean of the parts' parameters, goes through SGD (DiLoCo)."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True


Rule = Mean | Delayed | Average | AddDelta | Outer


@dataclass(frozen=True)
class Apply:
    """Update `step` happens now: version `step` becomes `step` + 1. Summed in the order of `parts`, which is rank order."""

    step: int
    parts: tuple[Part, ...]
    divisor: int
    """Sum of the counts: the weight of a part is count / divisor. 0 if there are only stand-ins: nothing moves."""
    rule: Rule
    reason: str

    @property
    def staleness(self) -> tuple[int, ...]:
        """By how many updates each part's parameters were behind."""
        return tuple(self.step - part.version for part in self.parts)


@dataclass(frozen=True)
class Grant:
    """The worker may compute `step` on this version; the pull that asked for it is answered."""

    worker: int
    step: int
    version: int
    reason: str
    pieces: tuple[int, ...] = ()
    """What it computes from, where parts are dealt by the policy."""


@dataclass(frozen=True)
class Wait:
    """Not yet; a Grant follows, unless the worker goes. `missing` are the workers that it waits for, as far as known."""

    worker: int
    step: int
    reason: str
    missing: tuple[int, ...] = ()


@dataclass(frozen=True)
class Halt:
    """Nothing is applied until the next term: a member is gone in mid-step."""

    reason: str


@dataclass(frozen=True)
class Rollback:
    """All ranges go back to this version; what was pushed for later ones is dropped and computed again."""

    version: int
    reason: str


Decision = Accept | Hold | Drop | Apply | Grant | Wait | Halt | Rollback


def divisor(parts: tuple[Part, ...]) -> int:
    return sum(part.count for part in parts)
