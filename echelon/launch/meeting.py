"""How a host, the first or a further one, gets its seat: it enlists, tries to reach the others, and waits for the end of that."""

from __future__ import annotations

import concurrent.futures
import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from echelon.clock import Deadline
from echelon.control import net
from echelon.control.rpc import Client, Unreached
from echelon.elastic.hosts import Host, Seat
from echelon.errors import WorldError

POLL_S = 2.0
REACH_S = 6.0
"""How long a connection to another host may take before that is told."""

CALL_S = 8.0
ENLIST_S = 3.0
SILENT_S = 15.0
"""A coordinator that was there and says nothing for so long will not come back; restarting takes a second or two."""


@dataclass(frozen=True)
class Me:
    """What a host says of itself when it enlists."""

    name: str
    address: str
    workers: int | None = None


@dataclass(frozen=True)
class Assembly:
    """The run's hosts, all there."""

    seats: tuple[Seat, ...]
    mine: Seat


class NotFormed(WorldError):
    """The hosts did not come together; every host that waited ends with the same code."""

    def __init__(self, reason: str, remedy: str, code: int) -> None:
        super().__init__(reason, remedy=remedy)
        self.exit_code = code


def meet(
    wire: Client, me: Me, deadline: Deadline, told: Callable[[Sequence[Host]], None] | None = None
) -> Assembly:
    """Blocks until every host is there and reaches the others. WorldError says who is missing or what went wrong.

    `told` is given the hosts so far, often. A connection that breaks (the coordinator was started again) is made anew.
    """
    with _probe(me.address) as port:
        known, there, checked, answered = "", [], False, Deadline.after(SILENT_S)
        problems: list[str] | None = None
        while True:
            try:
                if known in ("", "gathering"):
                    stage = wire.call("host.enlist", Deadline.after(ENLIST_S), name=me.name, address=me.address,
                                      workers=me.workers, probe_port=port)["stage"]  # fmt: skip
                    known = known or stage
                if problems is not None:
                    wire.call("host.reached", Deadline.after(CALL_S), problems=problems)
                    problems, checked = None, True
                answer = wire.call("host.gathered", Deadline.after(CALL_S), known=known if checked or known == "gathering" else "",
                                   timeout_s=min(POLL_S, deadline.left_s))  # fmt: skip
            except Unreached as error:
                if error.refused or answered.passed or deadline.passed:
                    raise
                known, checked, problems = "", False, None
                continue
            if answer["stage"] == "failed":
                raise NotFormed(answer["reason"], answer["remedy"], answer["code"])
            answered = Deadline.after(SILENT_S)
            known, there = answer["stage"], [Host(**host) for host in answer["hosts"]]
            if told is not None:
                told(there)
            if known == "formed":
                seats = tuple(Seat(**seat) for seat in answer["seats"])
                return Assembly(seats, next(seat for seat in seats if seat.key == answer["key"]))
            if known == "checking" and not checked:
                others = [host for host in there if host.key != answer["key"]]
                problems = reach(me, others)
            elif known == "gathering":
                checked = False
            if deadline.passed:
                raise missing(there, int(answer["wanted"]))


def missing(there: Sequence[Host], wanted: int) -> WorldError:
    """The error for a run that waited long enough."""
    lack = wanted - len(there)
    here = ", ".join(str(host) for host in there) or "none"
    return WorldError(
        f"{lack} of {wanted} hosts did not come in time; those that did: {here}",
        remedy="Start `echelon join` on the others, or give them longer with --join-timeout-s.",
    )


def reach(me: Me, others: Sequence[Host]) -> list[str]:
    """Tries a connection to every other host; a sentence for each that cannot be had. Blocks up to REACH_S."""
    if not others:
        return []
    with concurrent.futures.ThreadPoolExecutor(min(32, len(others))) as pool:
        return [problem for problem in pool.map(lambda host: _try(me, host), others) if problem]


def _try(me: Me, host: Host) -> str:
    if net.is_loopback(host.address):
        return f"{host} gave a loopback address, which {me.name} cannot reach"
    try:
        socket.create_connection(
            (host.address, host.probe_port), REACH_S, source_address=(me.address, 0)
        ).close()
        return ""
    except TimeoutError:
        found = "no answer (timeout: a firewall, or not the same network)"
    except ConnectionRefusedError:
        found = "refused"
    except OSError as error:
        found = str(error.strerror or error)
    with contextlib.suppress(WorldError):
        found += f", over {net.interface_of(me.address)}"
    return f"{me.name} ({me.address}) does not reach {host}: {found}"


@contextlib.contextmanager
def _probe(address: str) -> Iterator[int]:
    """A port that takes connections and closes them at once, so that the others can see whether they reach this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    over_out, over_in = socket.socketpair()
    with socket.create_server((address, 0), family=family) as listening, over_out, over_in:

        def hang_up() -> None:
            with selectors.DefaultSelector() as selector:
                selector.register(listening, selectors.EVENT_READ)
                selector.register(over_out, selectors.EVENT_READ)
                while all(key.fileobj is not over_out for key, _ in selector.select()):
                    with contextlib.suppress(OSError):
                        listening.accept()[0].close()

        thread = threading.Thread(target=hang_up, name="echelon-probe", daemon=True)
        thread.start()
        try:
            yield int(listening.getsockname()[1])
        finally:
            over_in.close()
            thread.join(1.0)
