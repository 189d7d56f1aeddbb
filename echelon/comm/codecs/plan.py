"""How coded rows meet: pure. Two ways, and not at all where that sends no more.

gather:  every rank gets every rank's coded row and adds them up: one message, one coding
scatter: every rank gets its slice of every row, adds those up, codes the sum and gives it to all: two messages, two codings
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echelon.comm.codecs.codec import Codec, padded

MESSAGE_BYTES = 8192
"""What a second message costs, in bytes: a round trip of 0.6 ms at 100 Mbit/s."""

SPARSE_WORTH = 8.0
"""Sparse rows are gathered, though that sends more, while it sends this many times less than no coding."""

Form = Literal["exact", "gather", "scatter"]


@dataclass(frozen=True)
class Plan:
    form: Form
    numel: int
    """Elements of a coded row: all of the bucket (gather) or a rank's slice (scatter), padded."""
    sent_bytes: int
    """What a rank sends in one meeting."""
    plain_bytes: int
    """… and would send without coding: a ring."""
    why: str


def pays(ranks: int) -> bool:
    """Is there anybody to send to?"""
    return ranks > 1


def plan(numel: int, itemsize: int, ranks: int, codec: Codec) -> Plan:
    """How `ranks` ranks sum buckets of `numel` elements of `itemsize` bytes with the fewest bytes."""
    plain = 2 * (ranks - 1) * numel * itemsize // ranks
    if not pays(ranks):
        return Plan("exact", numel, 0, 0, "nobody to send to")
    whole, slice_ = padded(numel), padded(-(-numel // ranks))
    gather = (ranks - 1) * codec.payload_bytes(whole)
    scatter = 2 * (ranks - 1) * codec.payload_bytes(slice_)
    if min(gather, scatter) >= plain:
        return Plan("exact", numel, plain, plain, f"{codec.name} makes {numel} elements no smaller")
    if codec.sparse and gather * SPARSE_WORTH <= plain:
        return Plan(
            "gather", whole, gather, plain, "a second choice among what was chosen would delay most of it"
        )
    if gather < plain and gather <= scatter + MESSAGE_BYTES:
        return Plan("gather", whole, gather, plain, "one message and one coding, and hardly more bytes")
    return Plan("scatter", slice_, scatter, plain, f"{gather / scatter:.1f} times fewer bytes than to gather")
