"""The wire of ps with apply=worker: servers sum their share of each bucket, the workers' own all-reduce the rest.

Links carry least where the shares are those of ps/shares.py: with k servers on hosts of their own beside n workers, servers take
k·2(n-1)/(n² + kn - 2k) of the elements. The workers' part goes around as it does without servers, which costs their links the
same bytes as if each held its part of it. Both sum in the order of ranks: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from echelon.clock import Deadline
from echelon.comm.group import Group, Outcome, Work, merge
from echelon.parallel.buckets import Bucket
from echelon.parallel.wire import PlainWire
from echelon.ps.shares import shares
from echelon.ps.window import Batch, Window
from echelon.ps.worker import Servers

ALIGN_BYTES = 64
LEAST_BYTES = 64 * 1024
"""A piece below this is not worth a message to a server."""
MESSAGE_BYTES = 1 << 18
"""A larger piece goes in messages of this: while one is summed, the next arrives and the last one's sum returns."""


EASE = Fraction(1, 50)
"""Workers' links carry this much more than the least there is, so that servers' links, where every message waits for the
slowest worker's, are done a little earlier: with all links loaded alike, a step ends with servers that are late and workers' links that idle."""
EASE_MOST = Fraction(1, 4)
"""… but servers give up no more than this part of their share for it."""


def servers_share(worker_hosts: Sequence[str], server_hosts: Sequence[str]) -> Fraction:
    """The part of the summing that servers take: only those on hosts of their own count, each host once. Workers of one host
    meet in its memory and count as one. A little less than the formula's: see EASE."""
    apart = set(server_hosts) - set(worker_hosts)
    hosts = max(1, len(set(worker_hosts)))
    found = shares(hosts, len(apart))
    whole = found.server * len(apart) + found.worker * hosts
    exact = Fraction(found.server * len(apart), whole)
    steep = (
        Fraction(2 * (hosts - 1), hosts) - 1
    )  # a worker's link carries 1 + steep * (1 - share) of the bytes
    if steep <= 0:
        return exact
    return exact - min(EASE_MOST * exact, EASE * (1 + steep * (1 - exact)) / steep)


class SumWire(PlainWire):
    """See wire.Wire. `share` of each bucket goes to the servers, which divide it evenly. `among`: the workers of the group, where
    that is not all of them."""

    def __init__(
        self, group: Group, servers: Servers, model: int, share: Fraction, among: Sequence[int] | None = None
    ) -> None:
        super().__init__(group)
        self.told = {} if among is None else {"of": list(among)}
        self.servers, self.model, self.share = servers, model, share
        self.windows = [Window(lanes) for lanes in servers.lanes]

    def send(self, bucket: Bucket) -> Work:
        flat = bucket.flat
        room = flat.numel() - (bucket.tail.numel() if bucket.tail is not None else 0)
        pieces = cut(room, flat.element_size(), self.share, len(self.servers))
        if not pieces or flat.device.type != "cpu":
            return super().send(bucket)
        number = self.servers.number(self.model)
        calls = []
        for window, piece in zip(self.windows, pieces, strict=True):
            parts = messages(*piece, flat.element_size())
            told = {"model": self.model, "number": number, **self.told}
            calls.append(window.add(({**told, "part": i}, flat[a:b]) for i, (a, b) in enumerate(parts)))
        end = pieces[-1][1]
        self.traffic.sent_bytes += end * flat.element_size()
        self.traffic.plain_bytes += end * flat.element_size()
        rest = [self._rest(flat[end:])] if end < flat.numel() else []
        return Sum(self.servers, calls, rest, end * flat.element_size())

    def _rest(self, flat: Tensor) -> Work:
        size = self.group.size
        self.traffic.sent_bytes += 2 * (size - 1) * flat.nbytes // size
        self.traffic.plain_bytes += 2 * (size - 1) * flat.nbytes // size
        return self.group.all_reduce(flat)


def cut(numel: int, itemsize: int, share: Fraction, num_servers: int) -> list[tuple[int, int]]:
    """[begin, end) of each server's piece of the first elements, each a multiple of 64 bytes; [] if it is not worth it."""
    if not num_servers:
        return []
    step = max(1, ALIGN_BYTES // itemsize)
    each = int(numel * share / num_servers) // step * step
    if each * itemsize < LEAST_BYTES and share < 1:
        return []
    if share == 1:
        each = max(step, -(-numel // num_servers) // step * step)
    ends = [min(numel, each * (i + 1)) for i in range(num_servers)]
    if share == 1:
        ends[-1] = numel
    pieces = list(zip([0, *ends[:-1]], ends, strict=True))
    return pieces if all(begin < end for begin, end in pieces) else []


def messages(
    begin: int, end: int, itemsize: int, message_bytes: int = MESSAGE_BYTES
) -> list[tuple[int, int]]:
    """[begin, end) of each message of a piece."""
    step = message_bytes // itemsize
    return [(at, min(at + step, end)) for at in range(begin, end, step)]


@dataclass
class Sum:
    """A bucket under way, to the servers and among the workers."""

    servers: Servers
    calls: list[Batch]
    rest: list[Work]
    num_bytes: int
    outcome: Outcome | None = None

    def wait(self, deadline: Deadline) -> Outcome:
        if self.outcome is None:
            found = [work.wait(deadline) for work in self.rest]
            found.append(self.servers.outcome(self.calls, "sums of gradients", self.num_bytes))
            self.outcome = merge(found)
        return self.outcome
