"""The answering end of the control wire: many connections in one event loop, none of which can hold up another.

A stranger may hold a connection for HANDSHAKE_S, one read's worth of memory, and one of MAX_STRANGERS places. Whoever proved
the token may send a frame of 16 MiB within FRAME_S; a frame that does not open ends its connection and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from echelon.control import calls, frames
from echelon.control import token as token_rules
from echelon.control.calls import Method, Request
from echelon.control.handshake import Identity, Refused, ServerSide, refusal
from echelon.errors import AuthError, EchelonError, UsageError, WireError

HANDSHAKE_S = 0.9
"""A connection that has not proved the token by then is closed (scanners see less than a second)."""

FRAME_S = 30.0
"""A frame that began must be here by then, and an answer taken."""

MAX_STRANGERS = 64
"""Connections that have not proved the token yet; further ones are closed at once, and a proper client tries again."""


class Watcher(Protocol):
    """Who wants to know of connections. Called in the event loop; must not raise."""

    def came(self, peer: Identity) -> None:
        """A connection of `peer` proved the token."""

    def went(self, peer: Identity) -> None:
        """That connection is over, for whatever reason."""

    def refused(self, address: str, code: str) -> None:
        """Somebody at `address` was refused: see handshake.REFUSALS."""


class Server:
    """Answers calls with `methods`. Made in an event loop; start() and close() there too.

    `roles` names who may call a method (absent: everyone who knows the token). A method that raises an
    EchelonError answers with it; any other exception is printed here and answered in general words. When a caller
    goes away, the method that works for it is cancelled.
    """

    def __init__(
        self,
        run: str,
        token: str,
        methods: Mapping[str, Method],
        *,
        roles: Mapping[str, frozenset[str]] | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        if len(token) < token_rules.MIN_CHARS:
            raise AuthError(
                f"a token of {len(token)} characters protects nothing", remedy="Use control.token.make()."
            )
        self._run, self._token = run, token
        self._methods = {name: (method, calls.Signature(name, method)) for name, method in methods.items()}
        self._roles = roles or {}
        self._watcher = watcher
        self._strangers = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, listening: socket.socket) -> None:
        """Takes connections from a socket that already listens. The caller keeps other copies of it."""
        self._server = await asyncio.start_server(self._connected, sock=listening, limit=1 << 14, backlog=128)

    async def close(self) -> None:
        """Ends every connection and every method at work."""
        if self._server is not None:
            self._server.close()
        while self._tasks:  # asyncio.wait_for may lose a cancellation that comes together with its result
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=0.2)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._strangers >= MAX_STRANGERS:
            writer.transport.abort()
            return
        self._strangers += 1
        task = asyncio.ensure_future(self._attend(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection from its first byte to its last. Never raises."""
        try:
            try:
                connection = await asyncio.wait_for(self._greet(reader, writer), HANDSHAKE_S)
            finally:
                self._strangers -= 1
            if connection is not None:
                await self._watched(connection)
        except (EchelonError, OSError, EOFError, TimeoutError):
            pass  # its own connection is all that it costs
        except asyncio.CancelledError:
            pass
        except Exception:
            traceback.print_exc(file=sys.stderr)
        finally:
            writer.transport.abort()

    async def _watched(self, connection: _Connection) -> None:
        if self._watcher is not None:
            self._watcher.came(connection.peer)
        try:
            await self._converse(connection)
        finally:
            if self._watcher is not None:
                self._watcher.went(connection.peer)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Connection | None:
        side = ServerSide(self._token, self._run)
        try:
            writer.write(side.challenge(frames.unpack(await _read(reader, frames.MAX_HELLO_BYTES))))
            session, proof = side.finish(frames.unpack(await _read(reader, frames.MAX_HELLO_BYTES)))
        except Refused as refused:
            writer.write(refusal(refused.code))
            where = writer.get_extra_info("peername")
            if self._watcher is not None and where:
                self._watcher.refused(str(where[0]), refused.code)
            writer.close()
            await writer.wait_closed()
            return None
        writer.write(proof)
        wire = writer.get_extra_info("socket")
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sealer, opener = frames.Sealer(session.from_server), frames.Opener(session.from_client)
        return _Connection(side.identity, reader, writer, sealer.seal, opener.open)

    async def _converse(self, connection: _Connection) -> None:
        """Calls in the order in which they came. The next call's header is awaited beside the method at work, so that
        a caller who goes away is noticed; nothing more of it is read."""
        reader = connection.reader
        header = asyncio.ensure_future(reader.readexactly(frames.LENGTH.size))
        try:
            while True:
                length = frames.length_of(await header, frames.MAX_FRAME_BYTES)
                request = calls.read_request(
                    connection.open(await asyncio.wait_for(reader.readexactly(length), FRAME_S))
                )
                header = asyncio.ensure_future(reader.readexactly(frames.LENGTH.size))
                work = asyncio.ensure_future(self._answer(connection.peer, request))
                try:
                    await asyncio.wait({work, header}, return_when=asyncio.FIRST_COMPLETED)
                    if header.done() and header.exception() is not None:
                        return
                    answer = await work
                finally:
                    await _cancel(work)
                connection.send(request.id, answer)
                await asyncio.wait_for(connection.writer.drain(), FRAME_S)
        finally:
            await _cancel(header)

    async def _answer(self, peer: Identity, request: Request) -> dict[str, Any]:
        try:
            if request.method not in self._methods:
                raise UsageError(
                    f"there is no method {request.method[:80]!r}", remedy="Are all hosts on one version?"
                )
            method, signature = self._methods[request.method]
            calls.may(peer, self._roles.get(request.method), request.method)
            signature.check(request.args)
            return {"id": request.id, "result": await method(peer, **request.args)}
        except EchelonError as error:
            return calls.error_answer(request.id, error)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            text = f"{request.method} failed in the coordinator: {type(error).__name__}"
            return calls.error_answer(request.id, EchelonError(text, remedy="See logs/coordinator-0.log."))


class _Connection:
    """One authenticated caller."""

    def __init__(
        self,
        peer: Identity,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        seal: Callable[[Any], bytes],
        open: Callable[[bytes], Any],
    ) -> None:
        self.peer, self.reader, self.writer, self.open = peer, reader, writer, open
        self._seal = seal

    def send(self, id: int, answer: dict[str, Any]) -> None:
        """Hands the answer to the transport; one that cannot travel becomes an error that says so."""
        try:
            frame = self._seal(answer)
        except UsageError as error:
            frame = self._seal(calls.error_answer(id, error))
        self.writer.write(frame)


async def _read(reader: asyncio.StreamReader, limit: int) -> bytes:
    try:
        header = await reader.readexactly(frames.LENGTH.size)
        return await reader.readexactly(frames.length_of(header, limit))
    except asyncio.IncompleteReadError:
        raise WireError("the connection ended in the middle of a frame") from None


async def _cancel(work: asyncio.Future[Any]) -> None:
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await work
