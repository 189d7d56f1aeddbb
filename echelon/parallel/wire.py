"""Wire: how a bucket becomes its sum over ranks. Plain, or coded (parallel/coded.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from echelon.comm.group import Group, Work
from echelon.parallel.buckets import Bucket, Rooms, Slot


@dataclass
class Traffic:
    """Bytes of gradients that this rank sent so far (as a ring would), and what it would have sent uncoded."""

    sent_bytes: int = 0
    plain_bytes: int = 0


class Wire(Protocol):
    """Every rank sends the same buckets in the same order. Works are waited for in the order in which they were sent."""

    codes: bool
    """Buckets have no gaps, and the tail, which is never coded, lies in one of its own."""

    traffic: Traffic
    rooms: Rooms
    """Where the memory of buckets comes from."""

    def send(self, bucket: Bucket) -> Work:
        """bucket.flat becomes the sum over ranks once wait() gave Met; it belongs to the wire until then."""
        ...

    def build(self, buckets: Sequence[Bucket]) -> None:
        """These are the buckets from now on. Between steps only."""
        ...

    def applied(self, slots: Sequence[Slot]) -> None:
        """An optimizer stepped on what these brought."""
        ...

    def withdraw(self, slots: Sequence[Slot]) -> None:
        """What these brought since it was last applied does not count: zero_grad, or no rank used them."""
        ...

    def rescale(self, factor: Tensor) -> None:
        """Gradients come in other units from now on."""
        ...

    def forget(self) -> None:
        """The meeting was given up."""
        ...


class PlainWire:
    """The group's own all-reduce: exact, nothing to remember."""

    codes = False

    def __init__(self, group: Group) -> None:
        self.group, self.traffic = group, Traffic()
        self.rooms: Rooms = group

    def send(self, bucket: Bucket) -> Work:
        count(self.traffic, bucket, self.group.size)
        return self.group.all_reduce(bucket.flat)

    def build(self, buckets: Sequence[Bucket]) -> None:
        pass

    def applied(self, slots: Sequence[Slot]) -> None:
        pass

    def withdraw(self, slots: Sequence[Slot]) -> None:
        pass

    def rescale(self, factor: Tensor) -> None:
        pass

    def forget(self) -> None:
        pass


def count(traffic: Traffic, bucket: Bucket, ranks: int) -> None:
    """One plain all-reduce of a bucket."""
    num_bytes = 2 * (ranks - 1) * bucket.flat.nbytes // ranks
    traffic.sent_bytes += num_bytes
    traffic.plain_bytes += num_bytes
