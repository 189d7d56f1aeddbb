"""The handshake over a blocking socket, on both sides, and frames with a deadline. The asynchronous server has its own."""

from __future__ import annotations

import contextlib
import socket

from echelon.clock import Deadline
from echelon.control import frames
from echelon.control.handshake import ClientSide, Identity, Refused, ServerSide, Session, refusal


def greet(wire: socket.socket, token: str, identity: Identity, deadline: Deadline) -> Session:
    """The client's side. AuthError when either does not know the token; OSError or WireError when the wire fails."""
    ours = ClientSide(token, identity)
    send(wire, ours.hello(), deadline)
    send(wire, ours.prove(_hello(wire, deadline)), deadline)
    return ours.finish(_hello(wire, deadline))


def admit(wire: socket.socket, token: str, run: str, deadline: Deadline) -> tuple[Session, Identity]:
    """The server's side. A stranger is told why (a word of ours, never his) and raises Refused here."""
    ours = ServerSide(token, run)
    try:
        send(wire, ours.challenge(_hello(wire, deadline)), deadline)
        session, proof = ours.finish(_hello(wire, deadline))
    except Refused as refused:
        with contextlib.suppress(OSError):
            send(wire, refusal(refused.code), deadline)
        raise
    send(wire, proof, deadline)
    return session, ours.identity


def _hello(wire: socket.socket, deadline: Deadline) -> object:
    return frames.unpack(receive(wire, frames.MAX_HELLO_BYTES, deadline))


def send(wire: socket.socket, frame: bytes, deadline: Deadline) -> None:
    wire.settimeout(max(0.001, deadline.left_s))
    wire.sendall(frame)


def receive(wire: socket.socket, limit: int, deadline: Deadline) -> bytes:
    header = exactly(wire, frames.LENGTH.size, deadline)
    return exactly(wire, frames.length_of(header, limit), deadline)


def exactly(wire: socket.socket, num_bytes: int, deadline: Deadline) -> bytes:
    held = bytearray()
    while len(held) < num_bytes:
        wire.settimeout(max(0.001, deadline.left_s))
        piece = wire.recv(min(num_bytes - len(held), 1 << 18))
        if not piece:
            raise ConnectionError("it was closed from the other side")
        held += piece
    return bytes(held)
