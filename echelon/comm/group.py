"""Group: the ranks that act together, and the outcome of acting.

A lost peer is a value, not an exception: whoever waits gets `Met` or `Lost` and decides. The exception comes only
when a policy says stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from echelon.clock import Deadline

Op = Literal["sum", "avg", "min", "max", "prod", "and", "or", "xor"]
"""avg is sum / size, for floats and complex numbers; and, or, xor work on the bits of integers and bools. Bools add as
`or` and multiply as `and`. Integers wrap around."""


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


class Receipt(Work, Protocol):
    """A recv under way."""

    source: int | None
    """The rank that the message came from; known when wait() gave Met."""


class Done:
    """A Work that was over when it began."""

    source: int | None = None

    def __init__(self, outcome: Outcome | None = None) -> None:
        self.outcome = outcome or Met()

    def wait(self, deadline: Deadline) -> Outcome:
        return self.outcome


class Group(Protocol):
    """The ranks that act together. Every rank calls the same operations in the same order.

    Operations return at once with a Work. Its tensor belongs to the group until wait() returns. wait() gives Met,
    or Lost(peers) when a peer died or the deadline passed: the tensor's content is then undefined, and every
    later operation of this group gives Lost as well. Sums are the same bits on every rank and from run to run.

    Tensors are contiguous, of any size (0 too), of one shape and type on every rank; all else is a UsageError before
    anything begins. What is reduced is float16/32/64, bfloat16, an integer of 8 to 64 bits, bool, or (sum and avg)
    complex; what is only moved may be of any type.
    """

    rank: int
    size: int
    local: bool
    """True when there is nobody else: a tensor is its own sum wherever it lies."""

    @property
    def sent_bytes(self) -> float:
        """What this rank sent by the operations that it began so far, each counted as mesh/moves.py says."""
        ...

    def buffer(self, nbytes: int) -> Tensor:
        """Memory (a flat uint8 tensor, zeroed) that this group reduces fastest. It lives as long as its views.

        OSError when there is none."""
        ...

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        """x becomes the reduction over ranks, in place."""
        ...

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> Work:
        """out becomes the reduction of what every rank has for me: x has one more leading dim, x[r] is for rank r.

        x is left as it was."""
        ...

    def reduce(self, x: Tensor, root: int = 0, op: Op = "sum") -> Work:
        """x on root becomes the reduction; elsewhere it stays as it was."""
        ...

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        """out[r] becomes rank r's x; out has one more leading dim of length `size`. x has one shape everywhere."""
        ...

    def gather(self, out: Tensor | None, x: Tensor, root: int = 0) -> Work:
        """out on root becomes what all_gather would give; elsewhere it is None."""
        ...

    def scatter(self, out: Tensor, x: Tensor | None, root: int = 0) -> Work:
        """out becomes root's x[rank]: x has one more leading dim on root, and is None elsewhere."""
        ...

    def all_to_all(self, out: Tensor, x: Tensor, out_counts: Sequence[int], counts: Sequence[int]) -> Work:
        """Flat tensors, cut into one piece a rank: the first counts[0] elements of x go to rank 0, the next counts[1] to
        rank 1; out receives out_counts[r] elements from rank r, in rank order. Pieces may be uneven, or empty."""
        ...

    def broadcast(self, x: Tensor, root: int = 0) -> Work:
        """x becomes root's x, in place."""
        ...

    def send(self, x: Tensor, peer: int, tag: int = 0) -> Work:
        """Sends x to another rank. Not part of the common order; over when x may be changed, which may be before the
        peer received it, or only then."""
        ...

    def recv(self, x: Tensor, peer: int | None, tag: int = 0) -> Receipt:
        """x becomes what the peer (None: anybody) sends with this tag. Messages of one sender and tag come in order."""
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
