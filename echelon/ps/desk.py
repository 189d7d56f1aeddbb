"""The way to the server that deals: the one that leads the first shard. When it dies, its successor is told what each worker knows."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from torch import Tensor

from echelon.errors import LinkLost
from echelon.ps.link import Link
from echelon.ps.pending import Pending, Reply
from echelon.ps.route import Route
from echelon.ps.worker import Servers


class Knows(Protocol):
    """What a worker knows of an epoch."""

    def known(self) -> list[Any]:
        """[loader, epoch, total, what it told to be done, what it has], as deal.rejoin takes it."""
        ...


class Desk:
    """One a run and worker. Calls go nowhere while the server is gone; whoever waits for an answer calls again()."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.epochs: dict[int, Knows] = {}
        """Loader -> its last epoch."""
        self.meeting: tuple[dict[str, Any], Tensor] | None = None
        """What the last meeting gave: somebody may have missed the answer."""
        self.live: tuple[int, ...] = ()
        """The workers that are still there, as the dealing server last told; () before it did."""
        self.question: dict[str, Any] = {}
        """The part that this worker asks about, if it does: which model's, its number and its pieces."""
        self.samples = 0
        """Of the batches that this worker told to be in updates."""
        way = servers.links[0]
        self._known: Link = way.link if isinstance(way, Route) else way
        self._lock = threading.Lock()

    @property
    def link(self) -> Link:
        """To the server that deals now; a successor is told what this worker knows before anything else."""
        way = self.servers.links[0]
        with self._lock:
            link = way.link if isinstance(way, Route) else way
            if link is not self._known and isinstance(way, Route):
                self._rejoin(link)
                self._known = link
        return link

    def tell(self, verb: str, head: dict[str, Any]) -> None:
        """Without an answer. A successor learns it from again()."""
        try:
            self.link.call(verb, head)
        except LinkLost:
            pass

    def ask(self, verb: str, head: dict[str, Any], payload: Tensor | None = None, what: str = "") -> Reply:
        """Waits for the answer; asks the successor when the server dies meanwhile."""
        while True:
            try:
                pending = self.link.call(verb, head, payload)
            except LinkLost:
                self.again()
                continue
            reply = self.wait(pending, what)
            if reply is not None:
                return reply

    def wait(self, pending: Pending, what: str) -> Reply | None:
        """The answer; None when its server died and a successor was found: ask again."""
        try:
            return self.servers.wait([pending], what)[0]
        except LinkLost:
            self.again()
            return None

    def again(self) -> None:
        """The server that dealt is gone: finds its successor. Raises LinkLost when there is none."""
        way = self.servers.links[0]
        if not isinstance(way, Route):
            raise LinkLost(
                "the server that deals the data is gone",
                remedy="With --servers 2 another one has a copy; a checkpoint has the ledger.",
            )
        self.servers.wait([way.call("deal.hello", {})], "the successor of the first server")

    def _rejoin(self, link: Link) -> None:
        told, rows = self.meeting if self.meeting is not None else ({}, None)
        head = {
            "epochs": [e.known() for e in self.epochs.values()], "question": self.question, "meeting": told, "samples": self.samples,
        }  # fmt: skip
        link.call("deal.rejoin", head, [rows] if rows is not None else [])
