"""The first parts of a step as a GradSync (ps, backup=b and aggregate=r): late ones are dropped, and their samples dealt again.

A step of a worker:
1. hold: its part goes to every server, and stays there
2. ask: the first server decides which parts make the update, and answers when this worker may go on
3. fold: the worker tells every server of the updates that were made, and takes the values
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from echelon.comm.group import Group, Met, Outcome
from echelon.errors import LinkLost, PeerLost
from echelon.parallel.gradsync import Groups
from echelon.parallel.stale import FreeSync
from echelon.ps.desk import Desk
from echelon.ps.worker import Servers, lost


@dataclass(frozen=True)
class Need:
    """How many parts make an update."""

    backup: int = 0
    aggregate: int = 0
    mean: bool = True
    """Parts are weighted by their samples; with loss=sum they are added."""


class FirstSync(FreeSync):
    """See GradSync."""

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter, bool]],
        group: Group,
        servers: Servers,
        model: int,
        need: Need,
        clip_norm: float = 0.0,
        **sizes: int,
    ) -> None:
        super().__init__(params, group, servers, model, 0, clip_norm, **sizes)
        self.need = need
        self.count: Callable[[], int] = lambda: 1
        """Samples in the part that is about to leave."""
        self.on_dropped: Callable[[], None] = lambda: None
        self.desk = Desk(servers)
        """The run's own, where there is one: it tells a server that takes over what this worker has."""
        self._asks = {"model": model, "backup": need.backup, "aggregate": need.aggregate}

    def _about(self) -> dict[str, Any]:
        return {"mean": self.need.mean}

    def apply(self, optimizer: int, groups: Groups, since: int | None = None) -> Outcome:
        self._only(optimizer)
        self._upload_changes()
        began, self.made = time.perf_counter(), 0
        try:
            if self.filled:
                self._give(optimizer, groups)
        except (LinkLost, PeerLost) as error:
            return lost(error)
        finally:
            self.wait_s += time.perf_counter() - began
        self._note_versions()
        return Met()

    def _give(self, optimizer: int, groups: Groups) -> None:
        servers = self.held.servers
        number, calls = self._part(optimizer, groups, "part.hold", None)
        servers.wait(calls[1:], "the servers to hold a part")
        head = {
            **self._asks, "number": number, "version": self.version, "count": self.count(), "pieces": self.pieces(),
            "stop": self.stop_wanted(),
        }  # fmt: skip
        self.desk.question = {key: head[key] for key in ("model", "number", "pieces")}
        reply = self.desk.ask("deal.part", head, what="the first parts of a step")  # behind its part there
        self.desk.question = {}
        servers.wait(calls[:1], "the first server to hold a part")
        if reply.head["used"] is False:
            self.on_dropped()
        self.stop_seen = self.stop_seen or bool(reply.head["stop"])
        self._fold(reply.head)

    def _fold(self, told: dict[str, Any]) -> None:
        """The servers make what was decided and they have not made; the values here are of that version."""
        if int(told["version"]) == self.version:
            return
        servers, room = self.held.servers, self.rooms[0]
        head = {"model": self.held.model, "log": told["log"]}
        ways = zip(servers.links, room, strict=True)
        calls = [way.call("part.fold", head, out=[x]) for way, x in ways]
        replies = servers.wait(calls, "values of the servers")
        for version, lead, not_made in replies[0].head.get("not_made", ()):
            behind = int(told["version"]) - 1 - int(version)
            if self._note(not_made, behind, int(lead) == self.group.rank):
                return
        self.held.take(room)
        self.made += int(told["version"]) - self.version
        self.version = int(told["version"])

    def _newest(self, begins: bool) -> None:
        head = {**self._asks, "version": self.version, "begins": begins}
        reply = self.desk.ask("deal.catch_up", head, what="the newest version")
        self._fold(reply.head)
        self._note_versions()

    def fresh(self) -> None:
        self._newest(begins=True)

    def drain(self) -> None:
        self._newest(begins=False)
