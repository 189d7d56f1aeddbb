"""The first host's view of the others: it gathers them, learns from events how they stand, and waits for them at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from echelon.clock import Deadline
from echelon.control.roster import SERVER, WORKER, Who
from echelon.elastic.hosts import Host, Seat
from echelon.errors import EchelonError
from echelon.events import (
    Event,
    HostAsked,
    HostCame,
    HostLeft,
    HostLost,
    HostRefused,
    HostWent,
    Knocked,
    Printed,
    ProcessEnded,
    ProcessStarted,
)  # fmt: skip
from echelon.launch.asked import Stop
from echelon.launch.link import Link
from echelon.launch.local import Plan
from echelon.launch.meeting import Assembly, Me, meet
from echelon.launch.rundir import Process, RunDir
from echelon.launch.streams import Streams
from echelon.show.lines import COLUMNS, Line, fold, spell_ranks
from echelon.show.progress import Display

JOIN_S = 300.0
"""How long the first host waits for the others, if nothing else is said: people type the command, schedulers queue."""

WAIT_S = 5.0
"""How long it waits at the end for the others to have ended everything."""

KNOCKS = {
    "token": "with a wrong token",
    "version": "with another version of Echelon",
    "run": "for another run",
    "role": "in a role that does not exist",
}


class Crew:
    """The hosts of a run, seen from the first. With one host there is nobody else, and everything here is at once."""

    def __init__(self, num_hosts: int = 1, me: Me | None = None, join_timeout_s: float = JOIN_S) -> None:
        self.num_hosts, self.me, self.join_timeout_s = num_hosts, me, join_timeout_s
        self.seats: tuple[Seat, ...] = ()
        self.ends: dict[Who, ProcessEnded] = {}
        """How workers and servers of other hosts ended, as their supervisors told it."""

        self.invitation: list[str] = []
        """What to type on the other hosts; said once the token's file is there."""

        self._here: Sequence[Host] = ()
        self._gone: set[int] = set()
        self._result: Assembly | EchelonError | None = None

    @property
    def several(self) -> bool:
        return self.num_hosts > 1

    def gather(self, link: Link, wake: Callable[[], None]) -> None:
        """Begins to wait for the others, in a thread; `wake` is called when there is news, result() tells it."""

        def work() -> None:
            deadline = Deadline.after(self.join_timeout_s)
            try:
                wire = link.dial(deadline)
                assert self.me is not None
                self._result = meet(wire, self.me, deadline, self._told)
                wire.close()
            except EchelonError as error:
                self._result = error
            wake()

        threading.Thread(target=work, name="echelon-gather", daemon=True).start()

    def result(self) -> Assembly | Stop | None:
        """What came of gathering, once; None while it goes on."""
        found, self._result = self._result, None
        if isinstance(found, EchelonError):
            return Stop(found.exit_code, f"the world did not form: {found.message}", _lines(found.remedy))
        if found is not None:
            self.seats = found.seats
        return found

    def waiting(self) -> str:
        """Who is there and how many are missing, in a line; "" when nobody is waited for."""
        if self.seats or not self.several:
            return ""
        here = ", ".join(str(host) for host in self._here) or "none yet"
        lack = self.num_hosts - max(1, len(self._here))
        return f"waiting for {lack} of {self.num_hosts} hosts · here: {here}"

    def take(
        self, event: Event, display: Display, streams: Streams, folder: RunDir, plan: Plan
    ) -> Stop | None:
        """Learns from an event of another host and passes it on; gives why the run is to end, if it does."""
        if said := sentence(event):
            display.say(*fold(said))
        if isinstance(event, Printed) and event.index != plan.index:
            streams.far(Line(event.stream, tuple(event.ranks), event.text, event.host))
        elif isinstance(event, (ProcessStarted, ProcessEnded)) and _is_far(event, plan):
            self._note(event, folder)
        elif isinstance(event, (HostLost, HostLeft)):
            self._gone.add(event.index)
        return _reason(event)

    def _note(self, event: ProcessStarted | ProcessEnded, folder: RunDir) -> None:
        """processes.json knows the processes of every host."""
        rank = event.rank or 0
        process = folder.processes.get((event.role, rank))
        if isinstance(event, ProcessStarted) or process is None:
            process = Process(event.role, rank, event.host, event.pid, event.time, elsewhere=True)
        if isinstance(event, ProcessStarted):
            process.incarnation = event.incarnation
        if isinstance(event, ProcessEnded):
            process.code, process.ended = event.code, event.time
            if event.role in (WORKER, SERVER):
                self.ends[Who(event.role, rank)] = event
        folder.put(process)

    def host_of(self, who: Who) -> str:
        """The name of the host where `who` runs; "" when that is not known."""
        return next((seat.name for seat in self.seats if seat.holds(who)), "")

    def on_host(self, who: Who) -> str:
        """` on h1` for messages; "" when there is one host."""
        return f" on {self.host_of(who)}" if self.host_of(who) else ""

    def all_gone(self) -> bool:
        """Has every other host ended what it had?"""
        return {seat.index for seat in self.seats} - {0} <= self._gone

    def _told(self, there: Sequence[Host]) -> None:
        self._here = there


def sentence(event: Event) -> str:
    """What a person at the first host reads of an event on the way to the run; "" for all others."""
    if isinstance(event, HostCame):
        return f"{event.host} ({event.address}) is here: {event.here} of {event.wanted} hosts"
    if isinstance(event, HostWent):
        return f"{event.host} ({event.address}) went away again: {event.here} of {event.wanted} hosts"
    if isinstance(event, Knocked):
        return f"{event.address} was refused: it came {KNOCKS.get(event.why, 'with something wrong')}"
    return ""


def _reason(event: Event) -> Stop | None:
    """Why the run is to end after this event, if it is."""
    if isinstance(event, HostLost):
        parts = [
            f"{role}{'s' * (len(ranks) != 1)} {spell_ranks(ranks)}"
            for role, ranks in ((WORKER, event.ranks), (SERVER, event.servers))
            if ranks
        ]
        with_it = " and ".join(parts)
        return Stop(
            137, f"host {event.host} ({event.address}) is gone, and {with_it} with it: {event.reason}"
        )
    if isinstance(event, HostRefused):
        return Stop(69, f"the world did not form: {event.reason}", _lines(event.remedy))
    if isinstance(event, HostAsked):
        return Stop(event.code, f"{event.reason} on {event.host}")
    return None


def _is_far(event: ProcessStarted | ProcessEnded, plan: Plan) -> bool:
    if event.role in (WORKER, SERVER):
        return not plan.is_here(Who(event.role, event.rank or 0))
    return event.rank != plan.index


def seats_line(seats: Sequence[Seat]) -> str:
    def runs(seat: Seat) -> str:
        servers = f"server{'s' * (seat.num_servers != 1)} {spell_ranks(seat.servers)}"
        parts = [spell_ranks(seat.ranks)] * bool(seat.ranks) + [servers] * bool(seat.servers)
        return f"{seat} runs {' and '.join(parts)}"

    return "hosts: " + " · ".join(map(runs, seats))


def _lines(remedy: str) -> tuple[str, ...]:
    return tuple(fold(remedy, COLUMNS - 2)) if remedy else ()
