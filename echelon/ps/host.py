"""Host: the serving end of the parameter server's wire, an object that any process may hold, and what it offers: services.

Every connection has a thread of its own that reads it and calls services, so nobody waits for somebody else's socket. Answers may be
given later and from any thread.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import selectors
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from echelon.clock import Deadline
from echelon.control import forks, net
from echelon.control import token as token_rules
from echelon.control.handshake import Refused
from echelon.errors import AuthError, EchelonError, UsageError, WorldError
from echelon.ps.attend import LAST_WORDS_S, Connection
from echelon.ps.frame import Limits
from echelon.ps.memory import Pool
from echelon.ps.reach import Address, memory_here, same_user, unix_name
from echelon.ps.service import Counters, Peer, Request, Service

__all__ = ["Counters", "Host", "Peer", "Request", "Service"]

BACKLOG = 128


@dataclass(frozen=True)
class Bound:
    """What a host listens on."""

    address: Address
    sockets: tuple[socket.socket, ...]


class Host:
    """Offers `services` to whoever proves the run's token: over TCP on the one address `bind` ("" for no port at all), and over a unix
    socket to processes of this host, which share memory with it.

    The name before the dot of a verb picks the service. In a forked child it is closed.
    """

    def __init__(
        self,
        services: Mapping[str, Service],
        token: str,
        run: str,
        bind: str = "127.0.0.1",
        *,
        port: int = 0,
        limits: Limits | None = None,
        shared: bool = True,
    ) -> None:
        if len(token) < token_rules.MIN_CHARS:
            raise AuthError(
                f"a token of {len(token)} characters protects nothing", remedy="Use token.make()."
            )
        self.services, self.token, self.run = dict(services), token, run
        self.limits, self.counters, self.pool = limits or Limits(), Counters(), Pool()
        self.id = secrets.token_hex(16)
        """Tells servers apart, whatever address they were reached at."""
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._connections: dict[int, Connection] = {}
        self._strangers = self._next = 0
        bound = _bind(bind, port, memory_here(), shared)
        self.where, self._listening = bound.address, bound.sockets
        self._thread: threading.Thread | None = None
        self._wake, self._woken = socket.socketpair()
        forks.register(self)

    @property
    def address(self) -> str:
        """What Link.connect takes."""
        return str(self.where)

    def start(self) -> None:
        """Takes connections from now on, on threads of its own."""
        self._thread = threading.Thread(target=self._accept, name="ps-accept", daemon=True)
        self._thread.start()

    def close(self, deadline: Deadline, reason: str = "the server is ending") -> None:
        """Tells every client, ends every connection and every thread; what is queued is sent until the deadline."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._woken.send(b"x")
        if self._thread is not None:
            self._thread.join(deadline.left_s)
        for wire in self._listening:
            wire.close()
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.say_goodbye(reason)
        words = deadline.sooner(LAST_WORDS_S)
        for connection in connections:
            connection.hang_up(words)
        for connection in connections:
            connection.join(deadline)
        self._wake.close()
        self._woken.close()

    def __enter__(self) -> Host:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close(Deadline.after(10))

    def after_fork(self) -> None:
        self._lock, self._stopping = threading.Lock(), threading.Event()
        self._stopping.set()
        for wire in self._listening:
            wire.close()
        for connection in self._connections.values():
            connection.after_fork()
        self._connections = {}
        self._wake.close()
        self._woken.close()

    # one thread takes connections; each goes on in its own

    def _accept(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._wake, selectors.EVENT_READ)
            for wire in self._listening:
                wire.setblocking(False)
                ready.register(wire, selectors.EVENT_READ)
            while not self._stopping.is_set():
                for key, _ in ready.select():
                    if isinstance(key.fileobj, socket.socket) and key.fileobj is not self._wake:
                        self._take(key.fileobj)

    def _take(self, listening: socket.socket) -> None:
        try:
            wire, _ = listening.accept()
        except BlockingIOError:
            return
        except OSError:  # out of descriptors, for example: those that are connected go on
            self._stopping.wait(0.05)
            return
        if listening.family == socket.AF_UNIX and not same_user(wire):
            self.counters.refused += 1
            wire.close()
            return
        with self._lock:
            if self._strangers >= self.limits.strangers:
                self.counters.refused += 1
                wire.close()
                return
            self._strangers += 1
            number, self._next = self._next, self._next + 1
            connection = self._connections[number] = Connection(self, wire, number)
        connection.start(self._attend)

    def _attend(self, connection: Connection) -> None:
        """One connection from its first byte to its last, on its own thread. Never raises."""
        admitted = False
        try:
            try:
                connection.greet(self.token, self.run)
            except (Refused, EchelonError, OSError, EOFError):
                self.counters.refused += 1
                return
            finally:
                with self._lock:
                    self._strangers -= 1
            with self._lock:
                admitted = True
                self.counters.connections += 1
            connection.converse()
        finally:
            connection.over()
            with self._lock:
                self._connections.pop(connection.number, None)
                self.counters.connections -= admitted


def _bind(bind: str, port: int, memory: str, shared: bool) -> Bound:
    sockets, host = [], ""
    if bind and ipaddress.ip_address(bind.partition("%")[0]).is_unspecified:
        raise UsageError(
            f"a parameter server on {bind} would listen on every interface, and it listens on one",
            remedy=f"Name it by its address: {net.spell_addresses()}.",
        )
    try:
        if bind:
            family = socket.AF_INET6 if ":" in bind else socket.AF_INET
            sockets.append(socket.create_server((bind, port), family=family, backlog=BACKLOG))
            host, port = bind, int(sockets[0].getsockname()[1])
        name = secrets.token_hex(16) if shared else ""
        if shared:
            sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sockets[-1].bind(unix_name(name))
            sockets[-1].listen(BACKLOG)
    except OSError as error:
        for wire in sockets:
            wire.close()
        raise WorldError(
            f"a parameter server cannot listen on {bind or 'a unix socket'}{f' port {port}' if port else ''}: {error.strerror}",
            remedy="Choose another address or port with --listen ADDR[:PORT].",
        ) from None
    return Bound(Address(host, port if bind else 0, name, memory if shared else ""), tuple(sockets))
