"""What a worker sees of all parameter servers together: their links, what it waits for, and terms."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from echelon import activity
from echelon.clock import Deadline
from echelon.comm.group import Lost, Met, Outcome
from echelon.control.member import Member
from echelon.errors import EchelonError, LinkLost, PeerLost
from echelon.ps.duty import address_key
from echelon.ps.frame import TRAINING
from echelon.ps.link import Link
from echelon.ps.pending import Answered, Reply

CONNECT_S = 60.0
WAIT_S = 1800.0
"""How long an answer may take: it may wait for the slowest worker. Who stands still is named long before (elastic/stuck.py)."""


LANES = 4
"""Connections to a server on another host that sums go over. Streams share a link evenly, and the workers' own all-reduce has as many
beside them: with one, a server's link would stand idle while workers fill theirs with each other's data."""


class Servers:
    """Every server's link, by rank. Waits are recorded, so that a server that stands still is named."""

    def __init__(
        self, links: Sequence[Link], hosts: Sequence[str], lanes: Sequence[Sequence[Link]] | None = None
    ) -> None:
        self.links, self.hosts = list(links), list(hosts)
        self.lanes = [list(of) for of in lanes] if lanes is not None else [[link] for link in links]
        """By server: the connections over which sums go, the link of `links` among them."""
        self.numbers: dict[int, int] = {}
        """Model -> operations begun so far that every worker takes part in."""
        self._begun = self._models = 0
        self._lock = threading.Lock()

    @classmethod
    def of_run(cls, member: Member, num_servers: int) -> Servers:
        """Connects to all servers of a run; blocks until they are there."""
        deadline = Deadline.after(CONNECT_S)
        wire = member.dial(deadline)
        lanes: list[list[Link]] = []
        try:
            for rank in range(num_servers):
                with activity.waiting(
                    f"{activity.SERVERS} {rank}", activity.ANYBODY, "the address of a server"
                ):
                    found = wire.call(
                        "store.get", deadline, key=address_key(rank), timeout_s=CONNECT_S, term=1 << 53
                    )
                to = (bytes(found).decode(), member.token, member.identity, deadline)
                lanes.append([Link.connect(*to, limits=TRAINING)])
                if not lanes[-1][0].local:
                    lanes[-1] += [Link.connect(*to, limits=TRAINING) for _ in range(LANES - 1)]
        except BaseException:
            for link in (link for of in lanes for link in of):
                link.close()
            raise
        finally:
            wire.close()
        seats = member.servers()
        hosts = [str(seats.get(rank, {}).get("host", "")) for rank in range(num_servers)]
        return cls([of[0] for of in lanes], hosts, lanes)

    def __len__(self) -> int:
        return len(self.links)

    def close(self) -> None:
        for link in (link for of in self.lanes for link in of):
            link.close()

    def new_model(self) -> int:
        """Its number: the same on all workers, since all prepare their models in the same order."""
        self._models += 1
        return self._models

    def number(self, model: int) -> int:
        """Of an operation in which every worker takes part: the same on all, since all begin them in the same order."""
        with self._lock:
            self.numbers[model] = self.numbers.get(model, 0) + 1
            self._begun += 1
            activity.begun[activity.SERVERS] = self._begun
            return self.numbers[model]

    def enter(self, term: int) -> None:
        """All workers of this term call it; it returns when all did. What was pushed and not used is void, an update that some servers
        lack did not happen, and operations are counted anew. The values on the servers are not to be relied on: see Held.bring().
        Raises LinkLost, PeerLost."""
        said = [link.call("train.enter", {"term": term}) for link in self.links]
        found = [reply.head["updates"] for reply in self.wait(said, f"all workers in term {term}")]
        agreed = {model: min(updates[model] for updates in found) for model in found[0]} if found else {}
        self.wait([link.call("train.settle", {"updates": agreed}) for link in self.links], "servers to agree")
        with self._lock:
            self.numbers.clear()
            self._begun = activity.begun[activity.SERVERS] = 0

    def wait(self, pendings: Sequence[Answered], what: str, num_bytes: int = 0) -> list[Reply]:
        """Every answer. Raises what a server raised, LinkLost, PeerLost."""
        deadline = Deadline.after(WAIT_S)
        replies = []
        with activity.waiting(activity.SERVERS, self._begun, what, num_bytes):
            for pending in pendings:
                replies.append(pending.wait(deadline))
        return replies

    def outcome(self, pendings: Sequence[Answered], what: str, num_bytes: int = 0) -> Outcome:
        """Met once all are answered; Lost when a server or a worker is gone."""
        try:
            self.wait(pendings, what, num_bytes)
        except (LinkLost, PeerLost) as error:
            return lost(error)
        return Met()


def lost(error: EchelonError) -> Lost:
    return Lost(error.peers, error.message)
