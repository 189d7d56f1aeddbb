"""How ranks of several hosts come to be connected: several TCP streams for each pair, every one of them authenticated.

Each rank listens on one address, tells it through the meeting, connects to the ranks below it and admits those above it.
Whoever connects shows that it knows the run's token, and says over a sealed frame which stream of which group and term
this is. Strangers, garbage, silence and older terms are dropped while the others go on. Then the descriptors are the
core's.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
from dataclasses import dataclass, field
from typing import Any

from echelon.clock import Deadline
from echelon.comm.handover import STRANGER_S, Meeting, Seat
from echelon.control import frames, greet, net
from echelon.control.handshake import Identity, Session
from echelon.errors import AuthError, EchelonError, WireError, WorldError

NUM_LANES = 2
STREAMS = 2
"""For each lane and peer, beside one for control and one for messages."""

MAX_WAITING = 128
"""Connections that have not said a word yet; the oldest makes room."""

SPARE_FILES = 512
"""Descriptors that are left for the script when the limit is raised."""

SLICE_S = 0.5
"""How often a wait looks at its deadline."""


@dataclass
class _Arrivals:
    """The listening end: who is in, and who has not said a word yet."""

    seat: Seat
    name: str
    streams: dict[int, list[socket.socket | None]]
    waiting: list[socket.socket] = field(default_factory=list)

    @property
    def missing(self) -> list[int]:
        return sorted(rank for rank, wires in self.streams.items() if None in wires)

    def admit(self, wire: socket.socket, deadline: Deadline) -> bool:
        """True when it was one of ours; otherwise it is closed."""
        try:
            session, who = greet.admit(wire, self.seat.token, self.seat.run, deadline.sooner(STRANGER_S))
            said = _told(wire, session, deadline.sooner(STRANGER_S))
            wires, stream = self.streams.get(who.rank), said.get("stream")
            fresh = said.get("group") == self.name and said.get("term") == self.seat.term
            if not fresh or wires is None or not isinstance(stream, int) or not 0 <= stream < len(wires):
                raise WireError("not of this group and term")
            if wires[stream] is not None:
                raise WireError("this stream is there already")
            wire.sendall(b"y")
        except (OSError, EchelonError):
            wire.close()
            return False
        wires[stream] = wire
        return True


def connect(meeting: Meeting, seat: Seat, name: str, address: str, deadline: Deadline) -> list[list[int]]:
    """Descriptors to every rank, empty for this one: control, messages, then STREAMS for each lane. Blocks until all are
    connected. `address` is the one that the others reach this rank at: nothing listens on any other, and nothing after this
    call. Every rank calls it with the same name."""
    num = 2 + NUM_LANES * STREAMS
    wires: dict[int, list[socket.socket | None]] = {}
    _allow_files(seat.size * num)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as undo, socket.socket(family, socket.SOCK_STREAM) as listening:
        undo.callback(_close_all, wires)
        listening.bind((address, 0))
        listening.listen(min(4096, seat.size * num))
        meeting.put(f"tcp/{name}/{seat.rank}", net.spell(address, listening.getsockname()[1]).encode())
        for peer in range(seat.rank):
            where = net.split(meeting.get(f"tcp/{name}/{peer}", deadline).decode())
            wires[peer] = []
            for stream in range(num):
                wires[peer].append(_reach(where, seat, peer, name, stream, deadline))
        arrivals = _Arrivals(seat, name, {peer: [None] * num for peer in range(seat.rank + 1, seat.size)})
        wires.update(arrivals.streams)
        undo.callback(_close_all, {-1: arrivals.waiting})
        _admit_all(listening, arrivals, deadline)
        links = [
            [wire.detach() for wire in wires.get(peer, []) if wire is not None] for peer in range(seat.size)
        ]
        wires.clear()
        return links


def _reach(
    where: tuple[str, int], seat: Seat, peer: int, name: str, stream: int, deadline: Deadline
) -> socket.socket:
    host, port = where
    try:
        wire = socket.create_connection((host, port), timeout=max(0.001, deadline.left_s))
    except OSError as error:
        raise WorldError(
            f"rank {seat.rank} cannot reach rank {peer} at {net.spell(host, port)}: {error}",
            remedy="Ranks of all hosts talk to each other directly: open the firewall between them, or name the right "
            "network with --listen and --interface.",
        ) from None
    try:
        session = greet.greet(wire, seat.token, Identity(seat.run, "worker", seat.rank, seat.term), deadline)
        said = frames.Sealer(session.from_client).seal({"group": name, "term": seat.term, "stream": stream})
        greet.send(wire, said, deadline)
        if greet.exactly(wire, 1, deadline) != b"y":
            raise WireError(f"rank {peer} gave another answer than yes")
        wire.settimeout(None)
    except (OSError, AuthError, WireError) as error:
        wire.close()
        raise WorldError(
            f"rank {seat.rank} was not let in by rank {peer} at {net.spell(host, port)}: {error}",
            remedy=f"Rank {peer} may have died or be in another term; its log says more.",
        ) from None
    return wire


def _told(wire: socket.socket, session: Session, deadline: Deadline) -> dict[str, Any]:
    said = frames.Opener(session.from_client).open(greet.receive(wire, frames.MAX_HELLO_BYTES, deadline))
    if not isinstance(said, dict):
        raise WireError("a stream that does not say what it is")
    return said


def _admit_all(listening: socket.socket, arrivals: _Arrivals, deadline: Deadline) -> None:
    """A connection is listened to only once it speaks, so that silent ones keep nobody waiting."""
    with selectors.DefaultSelector() as ready:
        listening.setblocking(False)
        ready.register(listening, selectors.EVENT_READ)
        while arrivals.missing:
            if deadline.passed:
                raise WorldError(
                    f"ranks {arrivals.missing} did not connect to rank {arrivals.seat.rank} in time",
                    remedy="Their logs say what they are doing; a firewall between hosts looks like this too.",
                )
            for key, _ in ready.select(max(0.001, min(SLICE_S, deadline.left_s))):
                if key.fileobj is not listening:
                    wire = key.fileobj
                    ready.unregister(wire)
                    arrivals.waiting.remove(wire)  # type: ignore[arg-type]
                    arrivals.admit(wire, deadline)  # type: ignore[arg-type]
                    continue
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    wire, _ = listening.accept()
                    arrivals.waiting.append(wire)
                    ready.register(wire, selectors.EVENT_READ)
                    if len(arrivals.waiting) > MAX_WAITING:
                        oldest = arrivals.waiting.pop(0)
                        ready.unregister(oldest)
                        oldest.close()


def _allow_files(num: int) -> None:
    """Raises this process's own limit of open files when so many more would not fit, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num + len(os.listdir("/proc/self/fd")) + SPARE_FILES
    if soft != resource.RLIM_INFINITY and wanted > soft:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _close_all(wires: dict[int, Any]) -> None:
    for some in wires.values():
        for wire in some:
            if wire is not None:
                wire.close()
