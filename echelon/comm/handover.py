"""How the ranks of one host come to share memory: descriptors of memfds, handed over an authenticated unix socket.

The lowest rank makes the control segment and listens on a socket without a file name (its name is random and goes through the
meeting); each of the others proves that it knows the token, hands in its arena, and gets the control segment and everybody's
arena back. Nothing here has a name that could be left behind, and the socket is closed when all are in.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from echelon.clock import Deadline
from echelon.control import greet
from echelon.control.handshake import Identity
from echelon.errors import EchelonError, WireError, WorldError

RING_BYTES = 4 * 1024 * 1024
NO_MEMORY = (
    "Free memory, or raise the limits of this container or shell (ulimit -a: virtual memory, file size, open files);"
    " --strategy backend=gloo goes without shared memory."
)
STRANGER_S = 5.0
"""The longest that somebody who knocks and says nothing keeps the others waiting."""


class Meeting(Protocol):
    """Where ranks that have not met leave word for each other. Keys are written once."""

    def put(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, deadline: Deadline) -> bytes:
        """Blocks until the key is there; WorldError at the deadline."""
        ...


class StoreMeeting:
    """A meeting in a torch Store: the coordinator's, or the one that torch hands to a backend."""

    def __init__(self, store: Any, prefix: str = "") -> None:
        self._store, self._prefix = store, prefix

    def put(self, key: str, value: bytes) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str, deadline: Deadline) -> bytes:
        self._store.wait([self._prefix + key], timedelta(seconds=max(0.001, deadline.left_s)))
        return bytes(self._store.get(self._prefix + key))


@dataclass(frozen=True)
class Seat:
    """This rank among those of its host, and what proves that it belongs there."""

    rank: int
    size: int
    token: str
    run: str
    term: int = 1


def chunk_bytes(size: int) -> int:
    """What goes through shared memory at a time: more among many, who then meet less often, and of whom each reads only its share."""
    return 256 * 1024 * (1 if size <= 3 else 2 if size == 4 else 4 if size <= 8 else 8)


def same_memory() -> str:
    """Equal for two processes exactly when they can share memory and find each other's unix sockets."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def enter(
    core: Any,
    meeting: Meeting,
    seat: Seat,
    name: str,
    deadline: Deadline,
    make: Callable[..., Any] | None = None,
) -> Any:
    """The core's group of these ranks; blocks until all are in. Every rank calls it with the same name.

    `make` is given rank, control segment, arenas and term, and makes the group; without it, one in shared memory alone."""
    fds: list[int] = []
    try:
        arena = _memfd(f"echelon-arena-{seat.rank}")
        fds = [arena]
        core.reserve(arena, seat.size, chunk_bytes(seat.size), RING_BYTES)
        key = f"shm/{name}"
        if seat.rank == 0:
            fds = _lead(core, meeting, seat, key, arena, deadline)
        else:
            fds = _follow(meeting, seat, key, arena, deadline)
        with contextlib.ExitStack() as links:
            control, arenas, wires = fds[0], fds[1 : 1 + seat.size], fds[1 + seat.size :]
            for wire in wires:
                links.callback(os.close, wire)
            fds = fds[: 1 + seat.size]
            group = (make or core.ShmGroup)(
                seat.rank, control, arenas, seat.term
            )  # the descriptors are the core's now
            fds = []
            _all_ready([socket.socket(fileno=os.dup(wire)) for wire in wires], seat, deadline)
            return group
    except OSError as error:
        raise WorldError(
            f"rank {seat.rank} cannot share memory with the others of this host: {error}",
            remedy=NO_MEMORY,
        ) from None
    finally:
        for fd in fds:
            os.close(fd)


def _lead(core: Any, meeting: Meeting, seat: Seat, key: str, arena: int, deadline: Deadline) -> list[int]:
    control = _memfd("echelon-control")
    core.format(control, seat.size, chunk_bytes(seat.size), RING_BYTES, seat.term)
    arenas, wires = {0: arena}, {}
    address = "\0echelon-" + secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(address)
        listening.listen(seat.size)
        meeting.put(key, address.encode())
        while len(arenas) < seat.size:
            listening.settimeout(_left(deadline, seat, set(range(seat.size)) - set(arenas)))
            try:
                wire, _ = listening.accept()
            except TimeoutError:
                continue
            got = _admit(wire, seat, deadline) if _same_user(wire) else None
            if got is None or got[0] in arenas:
                wire.close()
                continue
            rank, fd = got
            arenas[rank], wires[rank] = fd, wire
    fds = [control, *(arenas[rank] for rank in range(seat.size))]
    for wire in wires.values():
        socket.send_fds(wire, [b"f"], fds)
    return [*fds, *(wires[rank].detach() for rank in sorted(wires))]


def _same_user(wire: socket.socket) -> bool:
    """Names of such sockets can be read by every user of the machine: others' knocks cost nothing."""
    credentials = wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1]) in (os.geteuid(), 0)


def _admit(wire: socket.socket, seat: Seat, deadline: Deadline) -> tuple[int, int] | None:
    """The rank that knocked and its arena; None for a stranger, who is given STRANGER_S."""
    patience = deadline.sooner(STRANGER_S)
    try:
        _, who = greet.admit(wire, seat.token, seat.run, patience)
        said, fds, _, _ = socket.recv_fds(wire, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except (OSError, EchelonError):
        return None
    if said != b"a" or len(fds) != 1 or not 0 < who.rank < seat.size:
        for fd in fds:
            os.close(fd)
        return None
    return who.rank, fds[0]


def _follow(meeting: Meeting, seat: Seat, key: str, arena: int, deadline: Deadline) -> list[int]:
    address = meeting.get(key, deadline).decode()
    wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        wire.settimeout(max(0.001, deadline.left_s))
        wire.connect(address)
        greet.greet(wire, seat.token, Identity(seat.run, "worker", seat.rank), deadline)
        socket.send_fds(wire, [b"a"], [arena])
        said, fds, _, _ = socket.recv_fds(wire, 1, seat.size + 1, socket.MSG_CMSG_CLOEXEC)
        if said != b"f" or len(fds) != seat.size + 1:
            for fd in fds:
                os.close(fd)
            raise WireError(f"rank 0 of this host sent {len(fds)} segments instead of {seat.size + 1}")
    except TimeoutError:
        raise WorldError(f"rank {seat.rank}: rank 0 of this host did not answer in time") from None
    except BaseException:
        wire.close()
        raise
    os.close(arena)  # it came back with the others
    return [*fds, wire.detach()]


def _all_ready(wires: list[socket.socket], seat: Seat, deadline: Deadline) -> None:
    """Nobody goes on before everybody has mapped everything, so that from here on a death is seen in the segment."""
    try:
        for wire in wires:
            wire.settimeout(max(0.001, deadline.left_s))
        if seat.rank == 0:
            for wire in wires:
                _expect(wire, b"r")
            for wire in wires:
                wire.sendall(b"g")
        else:
            wires[0].sendall(b"r")
            _expect(wires[0], b"g")
    except OSError as error:
        raise WorldError(
            f"rank {seat.rank}: a rank of this host went away while memory was being shared: {error}"
        ) from None
    finally:
        for wire in wires:
            wire.close()


def _expect(wire: socket.socket, word: bytes) -> None:
    if wire.recv(1) != word:
        raise ConnectionError("closed")


def _left(deadline: Deadline, seat: Seat, missing: set[int]) -> float:
    if deadline.passed:
        raise WorldError(
            f"ranks {sorted(missing)} of this host did not come to share memory in time",
            remedy="Their logs say what they are doing; a slow start needs a longer --join-timeout-s.",
        )
    return max(0.001, min(deadline.left_s, 1.0))


def _memfd(name: str) -> int:
    return os.memfd_create(name, os.MFD_CLOEXEC)
