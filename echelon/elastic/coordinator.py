"""The one process that knows who is in the run. Not on the path of a step: it may restart while training goes on.

What it must not forget (membership, the table, a request to stop) is in journal.jsonl before anybody is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import resource
import signal
import socket
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from echelon.control.handshake import Identity
from echelon.control.roster import DEAD, FAILED, JOINED, SERVER, WORKER, Who
from echelon.control.server import Server
from echelon.control.terminated import ready_for_sigterm
from echelon.elastic import gathering, leading, membership
from echelon.elastic.gathering import Gathering
from echelon.elastic.history import History, said_by
from echelon.elastic.journal import Journal
from echelon.elastic.leading import Leading
from echelon.elastic.lookout import Lookout
from echelon.elastic.membership import Change, Membership
from echelon.elastic.meter import Meter
from echelon.elastic.table import Table
from echelon.errors import EchelonError, PeerLost, UsageError, WorldError
from echelon.events import Event, HostLeft, Logged, RunEnded, Serving, Sign, StopAsked

MAX_WAIT_S = 86400.0
LOOK_S = 1.0
MAX_PEERS = 10_000
SKEW_S = 1.0
"""Clocks that differ by less are taken as equal: a message may have been on its way for so long."""

JOURNAL_BYTES = 8 << 20
"""Beyond this and twice its last size, the journal is written anew without what was overtaken."""

ROLES = {
    "join": frozenset({"worker", "server", "supervisor", "cli"}),
    "leave": frozenset({"worker", "server"}),
    "died": frozenset({"supervisor"}),
    "stop": frozenset({"supervisor", "cli", "worker", "server"}),
    "watch": frozenset({"supervisor", "cli"}),
    **{f"store.{name}": frozenset({"worker", "server", "supervisor", "cli"})
       for name in ("set", "get", "wait", "add", "check", "compare_set", "delete", "count")},
    **dict.fromkeys(("roster", "servers", "beat"), frozenset({"worker", "server", "supervisor", "cli"})),
    **gathering.ROLES,
    **leading.ROLES,
    "seen": frozenset({"supervisor"}),
}  # fmt: skip
"""Who may call what; a worker or server may ask to stop, because a signal may reach it first."""


class Coordinator:
    """The methods that ranks, supervisor and command line call. Lives in one event loop; nothing here is shared."""

    def __init__(self, run_dir: Path) -> None:
        self.description = _describe(run_dir)
        num_servers = int(self.description.get("num_servers", 0))
        self.members = Membership(int(self.description["num_workers"]), num_servers=num_servers)
        self.journal = Journal(run_dir / "journal.jsonl")
        self.table = Table(lambda record: self._note(record, sync=False))
        self.history = History(run_dir / "events.jsonl")
        self.meter = Meter()
        self.lookout = Lookout()
        self.stopping = ""
        self.ended = False
        self.hosts = Gathering(
            int(self.description.get("num_hosts", 1)), self.members.num_workers, self._take,
            lambda record: self._note(record, sync=True), self._fall, num_servers,
        )  # fmt: skip
        self.leading = Leading(num_servers, lambda record: self._note(record, sync=True), self.history.add)
        self._steps: dict[Who, int] = {}
        self._taken: dict[Identity, int] = {}
        self._compact_bytes = JOURNAL_BYTES
        for record in self.journal.records:
            self._restore(record)
        self.journal.records.clear()

    def methods(self) -> dict[str, Any]:
        plain = (
            self.describe,
            self.join,
            self.beat,
            self.roster,
            self.servers,
            self.leave,
            self.died,
            self.watch,
            self.stop,
            self.seen,
        )
        store = (
            self.set,
            self.get,
            self.wait,
            self.add,
            self.check,
            self.compare_set,
            self.delete,
            self.count,
        )
        named = {m.__name__: m for m in plain} | {f"store.{m.__name__}": m for m in store}
        return named | self.hosts.methods() | self.leading.methods()

    def close(self) -> None:
        """Writes what is still open; the last thing this process does."""
        for metric in self.meter.finish():
            self.history.add(metric)
        self.history.close()
        self.journal.close()

    # membership

    async def describe(self, peer: Identity) -> dict[str, Any]:
        return self.description

    async def join(self, peer: Identity, host: str, pid: int) -> dict[str, Any]:
        self._taken.pop(peer, None)
        if peer.role in (WORKER, SERVER):
            self.lookout.joined(Who(peer.role, peer.rank))
            incarnation = peer.incarnation
            self._change(membership.join(self.members, peer.rank, host[:256], pid, incarnation, peer.role))
        return {"term": self.members.term}

    async def leave(self, peer: Identity, step: int, code: int) -> dict[str, Any]:
        self._change(membership.leave(self.members, peer.rank, step, code, peer.role))
        return {"term": self.members.term}

    async def died(
        self, peer: Identity, rank: int, code: int, role: str = WORKER, incarnation: int | None = None
    ) -> dict[str, Any]:
        who = Who(SERVER if role == SERVER else WORKER, rank)
        if not self.hosts.may_bury(peer, who):
            raise UsageError(f"{who} does not run on the host of {peer}")
        seat = self.members.seat(who)
        if (
            seat is None or incarnation is None or seat.incarnation <= incarnation
        ):  # another may sit there already
            self._change(membership.died(self.members, rank, code, self._steps.get(who, 0), who.role))
        return {"term": self.members.term}

    async def roster(self, peer: Identity) -> dict[str, Any]:
        return {
            str(rank): {**self._seat(seat), "incarnation": seat.incarnation, "term": seat.term}
            for rank, seat in sorted(self.members.seats.items())
        }

    async def servers(self, peer: Identity) -> dict[str, Any]:
        return {
            str(rank): {**self._seat(seat), "incarnation": seat.incarnation}
            for rank, seat in sorted(self.members.servers.items())
        }

    async def stop(self, peer: Identity, reason: str) -> dict[str, Any]:
        if not self.stopping:
            reason = reason[:1024] or f"{peer} asked for it"
            self._note({"kind": "stop", "term": self.members.term, "reason": reason}, sync=True)
            self.stopping = reason
            self.history.add(StopAsked(reason=reason))
        return {"reason": self.stopping}

    # what happens

    async def beat(
        self,
        peer: Identity,
        beat: dict[str, Any],
        events: list[dict[str, Any]],
        first: int = 0,
        sent: float = 0.0,
    ) -> dict[str, Any]:
        """A sign of life and what happened since the last. `first` numbers the events, so that a batch which was sent
        twice (its answer got lost) is taken once. `sent` is the caller's clock: what another host's says is set right."""
        self.hosts.beat(peer)
        ahead_s = sent - time.time() if math.isfinite(sent) and sent > 0 else 0.0
        known = self._taken.get(peer, 0)
        fresh = events[max(0, known - first) :]
        if len(self._taken) > MAX_PEERS:
            self._taken.clear()
        self._taken[peer] = max(known, first + len(events))
        for record in [beat, *fresh] if beat else fresh:
            event = said_by(peer.role, peer.rank, record)
            if event is not None:
                if abs(ahead_s) > SKEW_S:
                    event = dataclasses.replace(event, time=event.time - ahead_s)
                self._take(event)
        return {"term": self.members.term, "stop": bool(self.stopping)}

    async def seen(self, peer: Identity, ranks: dict[str, Any], stacks: dict[str, Any]) -> dict[str, Any]:
        """A host's supervisor tells {rank: [state, CPU seconds]} of its processes, and is told whose stack is wanted."""
        self.lookout.seen(ranks, stacks)
        return {"wanted": self.lookout.wanted()}

    async def look(self) -> None:
        """Once a second: is somebody stuck? Never returns."""
        while True:
            await asyncio.sleep(LOOK_S)
            for event in self.lookout.look(
                self.members.seats, self.members.num_workers, self.members.servers, self.members.num_servers
            ):
                self.history.add(event)

    async def watch(self, peer: Identity, after: int, timeout_s: float) -> dict[str, Any]:
        return await self.history.watch(after, _timeout(timeout_s))

    # the table

    async def set(self, peer: Identity, key: str, value: bytes) -> None:
        self.table.set(key, value)

    async def get(self, peer: Identity, key: str, timeout_s: float, term: int = 0) -> bytes:
        return await self.table.get(key, _timeout(timeout_s), lambda: self._lost(term))

    async def wait(self, peer: Identity, keys: list[str], timeout_s: float, term: int = 0) -> None:
        await self.table.wait(keys, _timeout(timeout_s), lambda: self._lost(term))

    async def add(self, peer: Identity, key: str, amount: int) -> int:
        return self.table.add(key, amount)

    async def check(self, peer: Identity, keys: list[str]) -> bool:
        return self.table.has(keys)

    async def compare_set(self, peer: Identity, key: str, expected: bytes, desired: bytes) -> bytes:
        return self.table.compare_set(key, expected, desired)

    async def delete(self, peer: Identity, key: str) -> bool:
        return self.table.delete(key)

    async def count(self, peer: Identity) -> int:
        return self.table.count()

    # inside

    def _change(self, change: Change | None) -> None:
        """Writes a change down, then lives by it."""
        if change is None:
            return
        after = membership.apply(self.members, change)
        self._note(change.to_dict(), sync=True)
        self.members = after
        if change.role == SERVER and change.state in (DEAD, FAILED):
            self.leading.fell(change.rank, change.reason)
        self.table.check_waits()
        for metric in self.meter.settle(self.members.awaited):
            self.history.add(metric)

    def _lost(self, term: int) -> EchelonError | None:
        ranks = self.members.lost_since(term)
        servers = self.members.servers_lost_since(term) if not self.leading.whole else ()
        if not ranks and not servers:
            return None
        gone = [
            *(self.members.servers[rank] for rank in servers),
            *(self.members.seats[rank] for rank in ranks),
        ]
        reasons = "; ".join(seat.reason for seat in gone[:8])
        return PeerLost(f"waiting for others is over: {reasons}", peers=ranks)

    def _fall(self, who: Who, reason: str) -> None:
        """A worker or server is gone with its host."""
        change = membership.died(self.members, who.rank, 137, self._steps.get(who, 0), who.role)
        self._change(change and dataclasses.replace(change, reason=f"{change.reason}: {reason}"))

    def _take(self, event: Event) -> None:
        if isinstance(event, HostLeft):
            self.hosts.left(event.index)
        if isinstance(event, Logged):
            if math.isfinite(event.weight):
                for metric in self.meter.add(event, self.members.awaited):
                    self.history.add(metric)
            return
        self.ended = self.ended or isinstance(event, RunEnded)
        if isinstance(event, Sign) and event.rank is not None:
            who = Who(SERVER if isinstance(event, Serving) else WORKER, event.rank)
            if self.members.seat(who) is not None:
                self._steps[who] = event.step
                self.lookout.beat(event)
        self.history.add(event)

    def _seat(self, seat: Change) -> dict[str, Any]:
        who = Who(seat.role, seat.rank)
        step = self._steps.get(who, seat.step) if seat.state == JOINED else seat.step
        return {"state": seat.state, "step": step, "host": seat.host, "pid": seat.pid}

    def _note(self, record: dict[str, Any], *, sync: bool) -> None:
        self.journal.add(record, sync=sync)
        if self.journal.size_bytes > self._compact_bytes:
            seats = [seat.to_dict() for seat in sorted(self.members.everybody, key=lambda seat: seat.term)]
            stop = (
                [{"kind": "stop", "term": self.members.term, "reason": self.stopping}]
                if self.stopping
                else []
            )
            self.journal.rewrite(
                [*seats, *stop, *self.hosts.record(), self.leading.record(), *self.table.records(), record]
            )
            self._compact_bytes = JOURNAL_BYTES + 2 * self.journal.size_bytes

    def _restore(self, record: Mapping[str, Any]) -> None:
        if record.get("kind") == "member":
            self.members = membership.apply(self.members, membership.read_change(record))
        elif record.get("kind") == "stop":
            self.stopping = str(record["reason"])
        elif record.get("kind") == "hosts":
            self.hosts.restore(record)
        elif record.get("kind") == "leads":
            self.leading.restore(record)
        elif record.get("kind") in ("set", "unset"):
            self.table.restore(record)


def serve(listen_fd: int, run_dir: Path, token: str, lifeline_fd: int | None = None) -> None:
    """Runs the coordinator on a socket that its parent bound. Blocks; call it in the main thread.

    SIGTERM ends it once the run is over; before that a first one asks the run to stop, as for any process of it. It
    also ends when the other end of the pipe `lifeline_fd` closes.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_serve(socket.socket(fileno=listen_fd), run_dir, token, lifeline_fd))


async def _serve(listening: socket.socket, run_dir: Path, token: str, lifeline_fd: int | None) -> None:
    over, loop = asyncio.Event(), asyncio.get_running_loop()
    coordinator = Coordinator(run_dir)
    asking: list[asyncio.Future[Any]] = []

    def terminate() -> None:
        if coordinator.ended or asking:
            over.set()
        else:
            me = Identity(coordinator.description["name"], "coordinator", 0)
            asking.append(asyncio.ensure_future(coordinator.stop(me, "SIGTERM to the coordinator")))

    loop.add_signal_handler(signal.SIGTERM, terminate)
    loop.add_signal_handler(signal.SIGINT, over.set)
    ready_for_sigterm()
    if lifeline_fd is not None:
        loop.add_reader(lifeline_fd, over.set)
    server = Server(
        str(coordinator.description["name"]),
        token,
        coordinator.methods(),
        roles=ROLES,
        watcher=coordinator.hosts,
    )
    await server.start(listening)
    looking = [asyncio.ensure_future(_again(look)) for look in (coordinator.look, coordinator.hosts.look)]
    try:
        await over.wait()
    finally:
        for task in looking:
            task.cancel()
        await asyncio.wait(looking, timeout=1.0)
        await server.close()
        coordinator.close()


async def _again(look: Callable[[], Awaitable[None]]) -> None:
    """Looks for ever: a bug in it is printed into this process's log, and costs one look, not all later ones."""
    while True:
        try:
            await look()
        except Exception:
            traceback.print_exc()
            await asyncio.sleep(LOOK_S)


def _describe(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "run.json"
    try:
        description = json.loads(path.read_text())
        if not isinstance(description["name"], str) or int(description["num_workers"]) < 1:
            raise ValueError("name or num_workers is wrong")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WorldError(
            f"{path} does not describe a run: {error}",
            remedy="The supervisor writes it before the coordinator starts.",
        ) from None
    return dict(description)


def _timeout(seconds: float) -> float:
    if not seconds >= 0:
        raise UsageError(f"timeout_s={seconds} is not a time")
    return min(float(seconds), MAX_WAIT_S)
