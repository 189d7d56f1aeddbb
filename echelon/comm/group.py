"""Group: the ranks that act together, and the outcome of acting.

A lost peer is a value, not an exception: whoever waits gets `Met` or `Lost` and decides. The exception comes only
when a policy says stop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from echelon.clock import Deadline

Op = Literal["sum", "max", "min"]


@dataclass(frozen=True)
class Met:
    """Every rank took part; the tensor holds the result."""


@dataclass(frozen=True)
class Lost:
    """Somebody did not: these peers as far as known, and why we think so."""

    peers: tuple[int, ...] = ()
    reason: str = ""


Outcome = Met | Lost


def merge(outcomes: list[Outcome]) -> Outcome:
    """Met if all met; otherwise everybody who was lost, with the first reason."""
    lost = [o for o in outcomes if isinstance(o, Lost)]
    if not lost:
        return Met()
    return Lost(
        tuple(sorted({p for o in lost for p in o.peers})), next((o.reason for o in lost if o.reason), "")
    )


class Work(Protocol):
    """An operation under way."""

    def wait(self, deadline: Deadline) -> Outcome:
        """Blocks until the operation is over or the deadline passed. Waiting again gives the same outcome."""
        ...


class Done:
    """A Work that was over when it began."""

    def __init__(self, outcome: Outcome | None = None) -> None:
        self.outcome = outcome or Met()

    def wait(self, deadline: Deadline) -> Outcome:
        return self.outcome


class Group(Protocol):
    """The ranks that act together. Every rank calls the same operations in the same order.

    Operations return at once with a Work. Its tensor belongs to the group until wait() returns. wait() gives Met,
    or Lost(peers) when a peer died or the deadline passed: the tensor's content is then undefined, and every
    later operation of this group gives Lost as well. Sums are the same bits on every rank and from run to run.
    """

    rank: int
    size: int
    local: bool
    """True when there is nobody else: a tensor is its own sum wherever it lies."""

    def buffer(self, nbytes: int) -> Tensor:
        """Memory (a flat uint8 tensor, zeroed) that this group reduces fastest. It lives as long as its views."""
        ...

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        """x becomes the sum (max, min) over ranks, in place."""
        ...

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        """out[r] becomes rank r's x; out has one more leading dim of length `size`. x has one shape everywhere."""
        ...

    def broadcast(self, x: Tensor, root: int = 0) -> Work:
        """x becomes root's x, in place."""
        ...

    def barrier(self) -> Work:
        """Over when every rank began it."""
        ...

    def abort(self, reason: str) -> None:
        """Gives up: operations under way and later ones are Lost. May be called from any thread."""
        ...

    def close(self) -> None:
        """Ends in order, after the last operation."""
        ...
