"""What a worker sees of all parameter servers together: their links, what it waits for, and terms."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from echelon import activity
from echelon.clock import Deadline
from echelon.comm.group import Lost, Met, Outcome
from echelon.control.member import Member
from echelon.errors import EchelonError, Late, LinkLost, PeerLost
from echelon.ps import undoing
from echelon.ps.link import Link
from echelon.ps.pending import Answered, Reply
from echelon.ps.pretend import Pretending
from echelon.ps.route import Route, Routed
from echelon.ps.site import Finder

CONNECT_S = 60.0
LOOK_S = 0.5
WAIT_S = 1800.0
"""How long an answer may take: it may wait for the slowest worker. Who stands still is named long before (elastic/stuck.py)."""


Way = Link | Route

LANES = 4
"""Connections to a server on another host that sums go over. Streams share a link evenly, and the workers' own all-reduce has as many
beside them: with one, a server's link would stand idle while workers fill theirs with each other's data."""


class Servers:
    """Every server's link, by rank. Waits are recorded, so that a server that stands still is named."""

    def __init__(
        self,
        links: Sequence[Way],
        hosts: Sequence[str],
        lanes: Sequence[Sequence[Link]] = (),
        replicas: int = 0,
    ) -> None:
        self.ways, self.hosts, self.replicas = list(links), list(hosts), replicas
        """By shard: the way to the server that holds it. With copies, another may take over."""
        self.links: list[Any] = list(links)
        """The same, or what stands for them while nothing counts."""
        self.lanes = [list(of) for of in lanes]
        """By server: the connections over which sums go."""
        self.numbers: dict[int, int] = {}
        """Model -> operations begun so far that every worker takes part in."""
        self._begun = self._models = 0
        self._lock = threading.Lock()

    @classmethod
    def of_run(cls, member: Member, num_servers: int, replicas: int = 0) -> Servers:
        """Connects to all servers of a run; blocks until they are there. With `replicas` a server that dies has a successor."""
        deadline, finder = Deadline.after(CONNECT_S), Finder(member)
        ways: list[Way] = []
        lanes: list[list[Link]] = []
        try:
            for shard in range(num_servers):
                where = f"{activity.SERVERS} {shard}"
                with activity.waiting(where, activity.ANYBODY, "the address of a server"):
                    link, epoch = finder.find(shard, -1, deadline)
                if replicas:
                    ways.append(Route(shard, link, epoch, finder.next))
                    continue
                ways.append(link)
                more = 0 if link.local else LANES - 1
                lanes.append([link, *(finder.connect(shard, deadline) for _ in range(more))])
        except BaseException:
            for way in [*ways, *(link for of in lanes for link in of)]:
                way.close()
            raise
        seats = member.servers()
        hosts = [str(seats.get(rank, {}).get("host", "")) for rank in range(num_servers)]
        return cls(ways, hosts, lanes, replicas)

    def __len__(self) -> int:
        return len(self.links)

    def close(self) -> None:
        for way in [*self.ways, *(link for of in self.lanes for link in of)]:
            way.close()

    @property
    def moved_bytes(self) -> int:
        """Pushed and pulled so far: see Link."""
        ways = {id(way): way for way in [*self.ways, *(link for of in self.lanes for link in of)]}
        return sum(way.moved_bytes for way in ways.values())

    def new_model(self) -> int:
        """Its number: the same on all workers, since all prepare their models in the same order."""
        self._models += 1
        return self._models

    @property
    def moves(self) -> int:
        """How often another server took over from one that died."""
        return sum(way.moves for way in self.ways if isinstance(way, Route))

    def number(self, model: int) -> int:
        """Of an operation in which every worker takes part: the same on all, since all begin them in the same order."""
        with self._lock:
            self.numbers[model] = self.numbers.get(model, 0) + 1
            self._begun += 1
            activity.begun[activity.SERVERS] = self._begun
            return self.numbers[model]

    def pretend(self, so: bool) -> None:
        """Nothing that is asked of the servers counts, and nothing reaches them: until pretend(False)."""
        self.links = [Pretending(way) for way in self.ways] if so else list(self.ways)

    def enter(self, term: int, look: Callable[[], None] = lambda: None, void: int | None = None) -> None:
        """All workers of this term call it; it returns when all did. What was pushed and not used is void, an update that some servers
        lack did not happen, nor did any of the iteration `void`, and operations are counted anew. The values on the servers are not to be
        relied on: see Held.bring(). `look` is called now and then meanwhile: it raises if somebody of this term is gone. Raises LinkLost,
        PeerLost."""
        for way in self.ways:
            if isinstance(way, Route):
                way.renew()
        said = [way.call("train.enter", {"term": term}) for way in self.ways]
        told = [reply.head for reply in self._watched(said, f"all workers in term {term}", look)]
        agreed = undoing.targets(told, void)
        said = [way.call("train.settle", {"updates": agreed}) for way in self.ways]
        self._watched(said, "servers to agree", look)
        with self._lock:
            self.numbers.clear()
            self._begun = activity.begun[activity.SERVERS] = 0

    def _watched(self, pendings: Sequence[Answered], what: str, look: Callable[[], None]) -> list[Reply]:
        deadline, replies = Deadline.after(WAIT_S), list[Reply]()
        with activity.waiting(activity.SERVERS, activity.ANYBODY, what):
            while len(replies) < len(pendings):
                try:
                    replies.append(pendings[len(replies)].wait(deadline.sooner(LOOK_S)))
                except Late:
                    if deadline.passed:
                        raise
                    look()
        return replies

    def wait(self, pendings: Sequence[Answered], what: str, num_bytes: int = 0) -> list[Reply]:
        """Every answer. Raises what a server raised, LinkLost, PeerLost."""
        deadline = Deadline.after(WAIT_S)
        replies = []
        with activity.waiting(activity.SERVERS, self._begun, what, num_bytes):
            for pending in pendings:
                replies.append(self._answer(pending, pendings, deadline))
        return replies

    def _answer(self, pending: Answered, others: Sequence[Answered], deadline: Deadline) -> Reply:
        """Where copies take over, a server may wait for another one's successor (judge.py), which is found by whoever waits for that one."""
        while self.replicas:
            try:
                return pending.wait(deadline.sooner(LOOK_S))
            except Late:
                if deadline.passed:
                    raise
                for other in others:
                    if isinstance(other, Routed):
                        other.revive()
        return pending.wait(deadline)

    def outcome(self, pendings: Sequence[Answered], what: str, num_bytes: int = 0) -> Outcome:
        """Met once all are answered; Lost when a server or a worker is gone."""
        try:
            self.wait(pendings, what, num_bytes)
        except (LinkLost, PeerLost) as error:
            return lost(error)
        return Met()


def lost(error: EchelonError) -> Lost:
    return Lost(error.peers, error.message)
