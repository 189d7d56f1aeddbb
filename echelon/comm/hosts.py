"""The core's group for ranks wherever they are: shared memory on one host, TCP among hosts, both where hosts hold several.

Which ranks share a host is found out, not told: each says through the meeting what memory it lives in. When all are connected
the first rank measures the way to the last host, and tells everybody, so that all choose the same way for each size.
"""

from __future__ import annotations

import array
import math
import time
from typing import Any

from echelon.clock import Deadline
from echelon.comm import handover, mesh
from echelon.comm.handover import Meeting, Seat
from echelon.control import forks
from echelon.errors import WorldError

LIMIT_S = 10.0
"""A host from which nothing is heard for so long is lost."""

CONGESTION = "cubic"
"""Several flows meet in each host's link: BBR, some systems' default, leaves 5 to 8 % of it unused there (docs/log.md)."""

EACH_S = 8e-6
"""What one more frame costs the processor."""

PINGS = 6
LITTLE_BYTES, MUCH_BYTES = 64 << 10, 1 << 20
QUICK_S = 0.01
"""A way on which LITTLE_BYTES take no longer is measured with MUCH_BYTES: below that, latency is all that shows."""

_BROADCAST, _F64 = 4, 1
_TAG = -1


def enter(
    core: Any,
    meeting: Meeting,
    seat: Seat,
    name: str,
    address: str,
    deadline: Deadline,
    *,
    where: str | None = None,
    limit_s: float = LIMIT_S,
    connect_s: float = math.inf,
) -> Any:
    """The core's group of these ranks; blocks until all are in. Every rank calls it with the same name.

    `address` is the one at which the other hosts reach this rank, `where` (for tests) the host that it says to be on. Once all have said
    so they may take `connect_s` to connect: one that dies meanwhile is not told by the meeting."""
    meeting.put(f"where/{name}/{seat.rank}", (where or handover.same_memory()).encode())
    hosts = gathered([meeting.get(f"where/{name}/{rank}", deadline) for rank in range(seat.size)])
    deadline = deadline.sooner(connect_s)
    if len(hosts) == 1:
        group = handover.enter(core, meeting, seat, name, deadline)
        forks.register(group)
        return group
    links = mesh.connect(meeting, seat, name, address, deadline)
    if len(hosts) == seat.size:
        group = core.TcpGroup(
            seat.rank, links, seat.term, limit_s, CONGESTION
        )  # the descriptors are the core's now
    else:
        number, mine = next((number, ranks) for number, ranks in enumerate(hosts) if seat.rank in ranks)
        local = Seat(mine.index(seat.rank), len(mine), seat.token, seat.run, seat.term)

        def make(rank: int, control: int, arenas: list[int], term: int) -> Any:
            return core.HierGroup(seat.rank, hosts, links, term, limit_s, CONGESTION, rank, control, arenas)

        group = handover.enter(core, meeting, local, f"{name}/{number}", deadline, make)
    forks.register(group)
    _agree_on_costs(group, seat, hosts[-1][0], deadline)
    return group


def gathered(words: list[bytes]) -> list[list[int]]:
    """The ranks of each host, hosts in the order of their first rank. Pure."""
    hosts: dict[bytes, list[int]] = {}
    for rank, word in enumerate(words):
        hosts.setdefault(word, []).append(rank)
    return list(hosts.values())


def costs_of(little_s: float, much_s: float, much_bytes: int) -> tuple[float, float]:
    """Latency, and seconds a byte, from how long nothing and `much_bytes` were under way. Pure."""
    alpha = max(1e-6, little_s)
    return alpha, max(1e-11, (much_s - alpha) / much_bytes)


def _agree_on_costs(group: Any, seat: Seat, far: int, deadline: Deadline) -> None:
    told = array.array("d", [0.0, 0.0])
    if seat.rank == 0:
        told = array.array("d", _measured(group, far, True, deadline))
    elif seat.rank == far:
        _measured(group, 0, False, deadline)
    at, _ = told.buffer_info()
    _over(group, group.collective(_BROADCAST, _F64, 0, 0, len(told), at, 0, 0), deadline)
    group.set_costs(told[0], told[1], EACH_S)


def _measured(group: Any, peer: int, asks: bool, deadline: Deadline) -> tuple[float, float]:
    """There and back, with nothing and with much; half of the best is the time of one way."""
    room = array.array("b", bytes(MUCH_BYTES))

    def best_of(times: int, num_bytes: int) -> float:
        took = []
        for _ in range(times):
            began = time.monotonic()
            for sends in (asks, not asks):
                _over(group, group.message(sends, room.buffer_info()[0], num_bytes, peer, _TAG), deadline)
            took.append((time.monotonic() - began) / 2)
        return min(took)

    def both(seconds: float) -> float:
        """What the asking side found, on both sides: what comes next depends on it."""
        word = array.array("d", [seconds])
        _over(group, group.message(asks, word.buffer_info()[0], 8, peer, _TAG), deadline)
        return word[0]

    nothing = best_of(PINGS, 8)
    much, num_bytes = both(best_of(2, LITTLE_BYTES)), LITTLE_BYTES
    if much < QUICK_S:
        much, num_bytes = best_of(2, MUCH_BYTES), MUCH_BYTES
    return costs_of(nothing, much, num_bytes)


def _over(group: Any, work: Any, deadline: Deadline) -> None:
    if not work.wait(deadline.left_s):
        peers, reason, _ = group.failure()
        raise WorldError(f"ranks {sorted(peers)} were lost while the hosts were being connected: {reason}")
