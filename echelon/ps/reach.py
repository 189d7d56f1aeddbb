"""How a client comes to a parameter server: its address as a value, and an authenticated socket to it, on one host or across.

An address is HOST:PORT, as a person types it, or what Host.address gives: HOST:PORT/NAME@MEMORY, where NAME is a unix socket without
a file and MEMORY tells whether this process can share memory with the server (`local/NAME@MEMORY`: no port at all).
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Any

from echelon.clock import Deadline
from echelon.comm.handover import same_memory
from echelon.control import greet, net
from echelon.control.handshake import Identity
from echelon.errors import AuthError, UsageError, WireError, WorldError
from echelon.ps import frame
from echelon.ps.frame import Limits
from echelon.ps.inbox import Inbox, prepare

RETRY_S = 0.05
CONNECT_S = 5.0
LOCAL = "local"
_WHERE = re.compile(r"[0-9a-f]{32}@[0-9a-f]{32}")


@dataclass(frozen=True)
class Address:
    """Where a server is. `host` "" when only processes of its own host can reach it; `name` "" when its unix socket is not known."""

    host: str = ""
    port: int = 0
    name: str = ""
    memory: str = ""

    def __str__(self) -> str:
        there = net.spell(self.host, self.port) if self.host else LOCAL
        return f"{there}/{self.name}@{self.memory}" if self.name else there

    @property
    def plain(self) -> str:
        """What people type and read."""
        return net.spell(self.host, self.port) if self.host else LOCAL

    @classmethod
    def parse(cls, text: str) -> Address:
        there, slash, where = text.partition("/")
        if slash and not _WHERE.fullmatch(where):
            raise UsageError(
                f"{text!r} is not the address of a parameter server",
                remedy="Give HOST:PORT, or all of what the server told.",
            )
        name, _, memory = where.partition("@")
        if there == LOCAL and slash:
            return cls("", 0, name, memory)
        host, port = net.split(there)
        return cls(host, port, name, memory)


def memory_here() -> str:
    """Equal for two processes that can share memory."""
    return hashlib.sha256(same_memory().encode()).hexdigest()[:32]


def unix_name(name: str) -> str:
    """The abstract socket: it has no file that could be left behind."""
    return f"\0echelon-ps-{name}"


def same_user(wire: socket.socket) -> bool:
    """Names of such sockets can be read by every user of the machine: memory is shared only with one's own."""
    credentials = wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1]) in (os.geteuid(), 0)


@dataclass
class Reached:
    """A connection whose two ends know each other."""

    wire: socket.socket
    inbox: Inbox
    address: Address
    welcome: dict[str, Any]


def reach(
    text: str, token: str, identity: Identity, deadline: Deadline, *, limits: Limits, shared: bool = True
) -> Reached:
    """Connects and authenticates both ways: over the unix socket when this process can share memory with the server, else TCP.

    A server that is not there yet is waited for until the deadline, then WorldError says what was found; AuthError at once.
    """
    address, here, pause = Address.parse(text), memory_here(), threading.Event()
    while True:
        try:
            return _reach_once(address, token, identity, deadline, limits, here if shared else "")
        except AuthError as error:
            raise AuthError(f"{address.plain}: {error.message}", remedy=error.remedy) from None
        except (OSError, WireError, EOFError) as error:
            if deadline.left_s <= RETRY_S or isinstance(error, socket.gaierror):
                raise _explain(address, error) from None
        pause.wait(RETRY_S)


def _reach_once(
    address: Address, token: str, identity: Identity, deadline: Deadline, limits: Limits, here: str
) -> Reached:
    near = bool(address.name) and address.memory == here
    if not address.host and not near:
        raise AuthError(
            "this server takes clients of its own host only, and this process is on another (or in another network namespace)",
            remedy="Start the server with an address: bind=ADDR, or `echelon serve --listen ADDR`.",
        )
    if near:
        try:
            return _open(socket.AF_UNIX, unix_name(address.name), address, token, identity, deadline, limits)
        except (OSError, WireError, EOFError):
            if not address.host:
                raise
    family = socket.AF_INET6 if ":" in address.host else socket.AF_UNSPEC
    reached = _open(family, (address.host, address.port), address, token, identity, deadline, limits)
    name, memory = str(reached.welcome.get("name", "")), str(reached.welcome.get("memory", ""))
    if near or not here or memory != here or not _WHERE.fullmatch(f"{name}@{memory}"):
        return reached
    try:
        nearer = Address(address.host, address.port, name, memory)
        closer = _open(socket.AF_UNIX, unix_name(name), nearer, token, identity, deadline, limits)
    except (OSError, WireError, EOFError):
        return reached
    reached.wire.close()
    return closer


def _open(
    family: int,
    where: Any,
    address: Address,
    token: str,
    identity: Identity,
    deadline: Deadline,
    limits: Limits,
) -> Reached:
    patience = max(0.001, min(CONNECT_S, deadline.left_s))
    if family == socket.AF_UNIX:
        wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        wire.settimeout(patience)
    else:
        wire = socket.create_connection(where, timeout=patience)
    try:
        if family == socket.AF_UNIX:
            wire.connect(where)
        greet.greet(wire, token, identity, deadline.sooner(CONNECT_S))
        wire.settimeout(patience)
        inbox = Inbox(wire, limits)
        head = inbox.header()
        if head is None:
            raise ConnectionError("it hung up")
        said = frame.unpack(inbox.take(head.head_bytes))
        if head.kind == frame.BYE:
            raise ConnectionError(f"it said: {said}")
        if head.kind != frame.WELCOME or not isinstance(said, dict):
            raise WireError("it did not say welcome")
        prepare(wire)
        return Reached(wire, inbox, address, said)
    except BaseException:
        wire.close()
        raise


def _explain(address: Address, error: Exception) -> WorldError:
    if isinstance(error, socket.gaierror):
        found, remedy = f"the name has no address (DNS): {error.strerror}", "Give the address in numbers."
    elif isinstance(error, TimeoutError):
        found, remedy = "no answer (timeout)", "A firewall may drop the packets, or it is stopped."
    elif isinstance(error, ConnectionRefusedError):
        found, remedy = "refused", "Nothing listens there: is the server still running?"
    else:
        found, remedy = (
            str(error) or type(error).__name__,
            "It may be ending, or something else took the port.",
        )
    return WorldError(f"the parameter server at {address.plain} cannot be reached: {found}", remedy=remedy)
