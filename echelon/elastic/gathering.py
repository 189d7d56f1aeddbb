"""How the hosts of a run come together, in the coordinator: they enlist, try whether they reach each other, get seats.

    gathering   until as many hosts are there as were asked for
    checking    each tries to reach every other, and says what it found
    formed      everybody has a seat; from now on a host that falls silent is lost
    failed      one refused, could not be reached, or the numbers do not fit: all are told why

What formed is in the journal; before that a restarted coordinator starts anew, and the hosts enlist again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections.abc import Callable, Mapping
from typing import Any

from echelon.control.handshake import JOINER, Identity
from echelon.control.roster import SERVER, WORKER, Who
from echelon.elastic import hosts
from echelon.elastic.hosts import Host, Seat, Signs
from echelon.errors import EchelonError, UsageError, WorldError
from echelon.events import Event, HostCame, HostLost, HostRefused, HostsFormed, HostWent, Knocked

GATHERING, CHECKING, FORMED, FAILED = "gathering", "checking", "formed", "failed"
LOOK_S = 0.25
MAX_WAIT_S = 30.0
MAX_KNOCKS = 16
MAX_NAME_CHARS = 256
MAX_TEXT_CHARS = 2000

ROLES = {
    "host.enlist": frozenset({JOINER, "supervisor"}),
    "host.refuse": frozenset({JOINER}),
    "host.reached": frozenset({JOINER, "supervisor"}),
    "host.gathered": frozenset({JOINER, "supervisor"}),
    "host.cancel": frozenset({"supervisor"}),
}
"""Who may call what: only hosts, before they have a seat and after."""


class Gathering:
    """Lives in the coordinator's event loop. `emit` takes events, `note` journal records, `fall` ranks that are gone."""

    def __init__(
        self,
        num_hosts: int,
        num_workers: int,
        emit: Callable[[Event], None],
        note: Callable[[dict[str, Any]], None],
        fall: Callable[[Who, str], None],
        num_servers: int = 0,
    ) -> None:
        self.num_hosts, self.num_workers, self.num_servers = num_hosts, num_workers, num_servers
        self.seats: list[Seat] = []
        self._emit, self._note, self._fall = emit, note, fall
        self._hosts: dict[int, Host] = {}
        self._reports: dict[int, list[str]] = {}
        self._failure: EchelonError | None = None
        self._code = WorldError.exit_code
        self._signs: dict[int, Signs] = {}
        self._knocks: set[tuple[str, str]] = set()
        self._news = asyncio.Event()

    def methods(self) -> dict[str, Any]:
        verbs = (self.enlist, self.refuse, self.reached, self.gathered, self.cancel)
        return {f"host.{verb.__name__}": verb for verb in verbs}

    @property
    def stage(self) -> str:
        if self._failure is not None:
            return FAILED
        if self.seats:
            return FORMED
        return CHECKING if len(self._hosts) == self.num_hosts else GATHERING

    # what hosts call

    async def enlist(
        self, peer: Identity, name: str, address: str, workers: int | None, probe_port: int
    ) -> dict[str, Any]:
        """A host is there. May be called again after a broken connection."""
        key = _key(peer)
        _check_address(address, name[:MAX_NAME_CHARS])
        if self._failure is None and key not in self._hosts:
            if self.stage != GATHERING or (
                key != 0 and len(self._hosts) - (0 in self._hosts) >= self.num_hosts - 1
            ):
                there = ", ".join(str(host) for host in hosts.order(list(self._hosts.values())))
                raise WorldError(
                    f"the run has its {self.num_hosts} hosts already: {there or 'it formed before'}",
                    remedy="Start `echelon run` with a larger --hosts, or leave this host out.",
                )
            if workers is not None and workers < 0:
                raise UsageError(f"--workers {workers} is not a number of processes")
            self._hosts[key] = Host(key, name[:MAX_NAME_CHARS], address[:MAX_NAME_CHARS], workers, probe_port)
            if self._fits():
                self._emit(
                    HostCame(
                        host=self._hosts[key].name,
                        address=address,
                        here=len(self._hosts),
                        wanted=self.num_hosts,
                    )
                )
            self._wake()
        return {"stage": self.stage}

    async def refuse(self, peer: Identity, name: str, address: str, reason: str) -> None:
        """A host says why it cannot take part: the run does not form."""
        if self.stage in (GATHERING, CHECKING):
            self._fail(
                WorldError(f"{name[:MAX_NAME_CHARS]} ({address[:80]}) refused: {reason[:MAX_TEXT_CHARS]}")
            )

    async def reached(self, peer: Identity, problems: list[str]) -> None:
        """What a host found when it tried to reach the others: nothing, or a sentence each."""
        if self.stage != CHECKING or _key(peer) not in self._hosts:
            return
        self._reports[_key(peer)] = [problem[:MAX_TEXT_CHARS] for problem in problems[:16]]
        if len(self._reports) == self.num_hosts:
            found = [
                problem
                for host in hosts.order(list(self._hosts.values()))
                for problem in self._reports[host.key]
            ]
            if found:
                self._fail(
                    WorldError("the hosts do not reach each other: " + "; ".join(found[:8]), remedy=UNREACHED)
                )
            else:
                self._form()

    async def cancel(self, peer: Identity, reason: str, code: int) -> None:
        """The first host gives up before the run formed: whoever waits is told why, and ends with the same code."""
        if peer.rank == 0 and self.stage in (GATHERING, CHECKING):
            self._failure, self._code = WorldError(reason[:MAX_TEXT_CHARS]), code & 0xFF or 1
            self._wake()

    async def gathered(self, peer: Identity, known: str, timeout_s: float) -> dict[str, Any]:
        """Waits until the stage is another than `known`; gives the stage, the hosts so far, and the seats."""
        deadline = time.monotonic() + min(max(0.0, timeout_s), MAX_WAIT_S)
        while self.stage == known and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), left)
        if self._failure is not None:
            why = {"reason": self._failure.message, "remedy": self._failure.remedy, "code": self._code}
            return {"stage": FAILED, **why}
        there = hosts.order(list(self._hosts.values()))
        return {
            "stage": self.stage, "key": _key(peer), "wanted": self.num_hosts,
            "hosts": [vars(host) for host in there], "seats": [seat.to_dict() for seat in self.seats],
        }  # fmt: skip

    # what the wire tells (a Watcher)

    def came(self, peer: Identity) -> None:
        sign = self._signs.get(peer.rank) if peer.role == "supervisor" else None
        if sign is not None:
            sign.connections, sign.hung_up = sign.connections + 1, None

    def went(self, peer: Identity) -> None:
        if peer.role == JOINER and self.stage in (GATHERING, CHECKING):
            host = self._hosts.pop(_key(peer), None)
            self._reports.clear()
            if host is not None:
                self._emit(
                    HostWent(
                        host=host.name, address=host.address, here=len(self._hosts), wanted=self.num_hosts
                    )
                )
                self._wake()
        sign = self._signs.get(peer.rank) if peer.role == "supervisor" else None
        if sign is not None:
            sign.connections = max(0, sign.connections - 1)
            if sign.connections == 0:
                sign.hung_up = time.monotonic()

    def refused(self, address: str, code: str) -> None:
        """Told once for an address and a reason, and only so many: strangers must not fill the history."""
        if self.num_hosts > 1 and len(self._knocks) < MAX_KNOCKS and (address, code) not in self._knocks:
            self._knocks.add((address, code))
            self._emit(Knocked(address=address, why=code))

    def beat(self, peer: Identity) -> None:
        if peer.role == "supervisor" and peer.rank in self._signs:
            self._signs[peer.rank].seen = time.monotonic()

    def left(self, index: int) -> None:
        """A host said goodbye: it is not missed any more."""
        self._signs.pop(index, None)

    def may_bury(self, peer: Identity, who: Who) -> bool:
        """May this supervisor say that `who` is over? The first host's may, others for their own."""
        return (
            peer.rank == 0 or not self.seats or any(s.index == peer.rank and s.holds(who) for s in self.seats)
        )

    def restore(self, record: Mapping[str, Any]) -> None:
        """The journal's record of what formed."""
        self.seats = [Seat(**seat) for seat in record["seats"]]
        self._watch_over()

    def record(self) -> list[dict[str, Any]]:
        """The same, for a journal that is written anew."""
        return [{"kind": "hosts", "seats": [seat.to_dict() for seat in self.seats]}] if self.seats else []

    async def look(self) -> None:
        """Finds lost hosts, for ever. If this very process was stopped, nobody is blamed for that time."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(LOOK_S)
            late = time.monotonic() - before - LOOK_S
            if late > 1.0:
                for sign in self._signs.values():
                    sign.seen += late
                    sign.hung_up = None if sign.hung_up is None else sign.hung_up + late
            for index, reason in hosts.lost(time.monotonic(), self._signs).items():
                self._lose(self.seats[index], reason)

    # inside

    def _fits(self) -> bool:
        """Do the numbers that hosts asked for still leave a worker, or a server, for each of the others?"""
        asked = [host.asked for host in self._hosts.values() if host.key != 0]
        try:
            left, free = self.num_hosts - 1 - len(asked), self.num_servers - asked.count(0)
            rest = [0 if index < free else None for index in range(left)]
            hosts.deal(self.num_workers, [None, *asked, *rest], self.num_servers)
        except WorldError as error:
            self._fail(error)
            return False
        return True

    def _form(self) -> None:
        self.seats = hosts.seats(self.num_workers, list(self._hosts.values()), self.num_servers)
        self._note({"kind": "hosts", "seats": [seat.to_dict() for seat in self.seats]})
        self._watch_over()
        self._emit(HostsFormed(hosts=[seat.to_dict() for seat in self.seats]))
        self._wake()

    def _watch_over(self) -> None:
        now = time.monotonic()
        self._signs = {seat.index: Signs(now) for seat in self.seats if seat.index != 0}

    def _lose(self, seat: Seat, reason: str) -> None:
        self._signs.pop(seat.index, None)
        self._emit(
            HostLost(host=seat.name, address=seat.address, index=seat.index, ranks=list(seat.ranks), reason=reason,
                     servers=list(seat.servers))
        )  # fmt: skip
        for who in [
            *(Who(WORKER, rank) for rank in seat.ranks),
            *(Who(SERVER, rank) for rank in seat.servers),
        ]:
            self._fall(who, f"its host {seat.name} is gone")

    def _fail(self, error: EchelonError) -> None:
        self._failure = self._failure or error
        self._emit(HostRefused(reason=error.message, remedy=error.remedy))
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _check_address(address: str, name: str) -> None:
    """Addresses come in numbers, and one that only its own machine reaches is of no use to the others."""
    try:
        number = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        raise UsageError(f"{address[:80]!r} is not an address in numbers") from None
    if number.is_loopback or number.is_unspecified:
        raise WorldError(
            f"{name} says that it is at {address}: only that machine itself reaches this address",
            remedy="Choose the interface that faces the other hosts with `echelon join --interface I`.",
        )


def _key(peer: Identity) -> int:
    """The first host's supervisor is 0; a joiner's incarnation is a number it drew, and never 0."""
    return 0 if peer.role != JOINER else peer.incarnation or 1


UNREACHED = (
    "Workers of all hosts talk to each other on ports that the kernel chooses: let the firewall pass TCP between these "
    "addresses, or choose another network with --listen ADDR and `join --interface I`."
)
