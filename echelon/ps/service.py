"""What a host offers and how it is asked: Service, the contract; Request, one call; Peer, who calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from echelon.errors import EchelonError, UsageError
from echelon.ps.frame import Room


@dataclass(frozen=True)
class Peer:
    """Who calls. `link` tells two connections of one process apart."""

    role: str
    rank: int
    incarnation: int
    link: int
    local: bool = False

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


class Service(Protocol):
    """What a host offers under a name."""

    def called(self, request: Request) -> None:
        """On the connection's own thread, in the order in which its calls came: whoever stays here long keeps that client waiting, and
        nobody else. Answers now, or later from any thread. An EchelonError raised here is answered for it."""

    def gone(self, peer: Peer) -> None:
        """The connection is over, and nothing of it will be called any more; answers to it go nowhere."""


@dataclass
class Counters:
    """What a display shows of a host. Close to right: threads do not wait for each other to count."""

    calls: int = 0
    bytes_in: int = 0
    """Received over sockets, and read from shared memory."""
    bytes_out: int = 0
    connections: int = 0
    """Open now."""
    refused: int = 0
    """Handshakes that failed, and connections that came when too many strangers were there."""


class Answering(Protocol):
    """The connection that a request came over."""

    def room(self, rooms: list[Room]) -> tuple[list[Tensor], Tensor | None]: ...

    def answer(
        self,
        request: Request,
        head: dict[str, Any],
        tensors: Sequence[Tensor],
        sent: Callable[[], None] | None,
    ) -> None: ...

    def refuse(self, request: Request, error: EchelonError) -> None: ...


class Request:
    """One call. Answered or refused exactly once; until then its tensors stay as they are, in the client's memory or in ours."""

    __slots__ = (
        "_buffer",
        "_connection",
        "_number",
        "_once",
        "_room",
        "_rooms",
        "head",
        "num_bytes",
        "peer",
        "tensors",
        "verb",
    )

    def __init__(
        self,
        connection: Answering,
        peer: Peer,
        number: int,
        verb: str,
        head: dict[str, Any],
        tensors: list[Tensor],
        rooms: list[Room],
    ) -> None:
        self.peer, self.verb, self.head, self.tensors = peer, verb, head, tensors
        self._connection, self._number, self._rooms = connection, number, rooms
        self._once = [True]
        self._buffer: Tensor | None = None
        self._room: tuple[list[Tensor], Tensor | None] | None = None
        self.num_bytes = 0

    @property
    def out_bytes(self) -> int:
        """Room that the client gave for the answer's tensors."""
        return sum(room.num_bytes for room in self._rooms)

    @property
    def room_bytes(self) -> list[int]:
        """The same for each of them."""
        return [room.num_bytes for room in self._rooms]

    @property
    def lasting(self) -> bool:
        """Do its tensors stay as they are after the answer, until the client writes there again?"""
        return self._buffer is None

    def room(self) -> list[Tensor]:
        """Memory to put the answer's tensors in, as bytes, one for each that the client has room for: its own memory where that is
        shared. answer() with views of these copies nothing."""
        if self._room is None:
            self._room = self._connection.room(self._rooms)
        return self._room[0]

    def answer(
        self,
        head: dict[str, Any] | None = None,
        tensors: Sequence[Tensor] = (),
        sent: Callable[[], None] | None = None,
    ) -> None:
        """From any thread; never waits for the client. As many tensors as it has room for, of the same bytes each, or none.

        The tensors are the caller's again when this returns; with `sent`, they stay the wire's until it is called, and are not copied.
        """
        if not self._claim():
            raise UsageError(f"{self.verb} was answered a second time")
        self._connection.answer(self, head or {}, tensors, sent)

    def refuse(self, error: EchelonError) -> None:
        """The error is raised where the client waits, by its name and with its remedy."""
        if self._claim():
            self._connection.refuse(self, error)

    def _claim(self) -> bool:
        """True for the first who asks, whatever the thread."""
        try:
            return self._once.pop()
        except IndexError:
            return False
