"""The caller's end of the control wire: one connection, one call at a time, every call with a deadline.

The other end is control/server.py. Blocking, so that a training script needs no event loop.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import Any

from echelon.clock import Deadline
from echelon.control import calls, forks, frames, greet, net
from echelon.control.handshake import Identity
from echelon.errors import AuthError, EchelonError, UsageError, WireError, WorldError

__all__ = ["Client", "Identity", "Unreached"]

RETRY_S = 0.05
CONNECT_S = 5.0


class Unreached(WorldError):
    """The wire failed, not the call: nobody answered. `refused` when the machine is there and nothing listens."""

    refused = False


class Client:
    """An authenticated connection to the coordinator, usable from any thread of this process.

    Calls wait for each other: use a second Client for what may block long. A connection that broke is made anew
    by the next call, so a restarted coordinator is found again. A call whose connection breaks before the answer
    raises WorldError and is not repeated: it may or may not have happened. In a forked child it is closed.
    """

    def __init__(self, address: str, token: str, identity: Identity) -> None:
        self.address, self.identity = address, identity
        self._token = token
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._socket: socket.socket | None = None
        self._closed = False
        self._next_id = 0
        forks.register(self)

    @classmethod
    def connect(cls, address: str, token: str, identity: Identity, deadline: Deadline) -> Client:
        """Connects and authenticates both ways. AuthError at once for a wrong token or run; a server that is not
        there yet is waited for until the deadline, then WorldError says what was found at the address."""
        client = cls(address, token, identity)
        client._open(deadline)
        return client

    def call(self, method: str, deadline: Deadline, **args: Any) -> Any:
        """The result of `method` on the server, or the error it raised there. Blocks until the deadline at most.
        Not for signal handlers: the thread they interrupt may be in a call itself."""
        if not self._lock.acquire(timeout=min(deadline.left_s, threading.TIMEOUT_MAX)):
            raise WorldError(f"{method}: the connection was busy with another call until the deadline")
        try:
            if self._closed or self._pid != os.getpid():
                raise UsageError(
                    f"{method}: this connection is closed", remedy="A forked child makes its own with dial()."
                )
            if self._socket is not None and _ended(self._socket):
                self._drop()
            if self._socket is None:
                self._open(deadline)
            return self._exchange(method, deadline, args)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Ends the connection, and with it a call that waits in another thread. May be called again."""
        self._closed = True
        self._drop()

    def after_fork(self) -> None:
        self._closed = True
        self._lock = threading.Lock()
        held, self._socket = self._socket, None
        if held is not None:
            with contextlib.suppress(OSError):
                held.close()

    def _exchange(self, method: str, deadline: Deadline, args: dict[str, Any]) -> Any:
        id, self._next_id = self._next_id, self._next_id + 1
        frame = self._sealer.seal({"id": id, "method": method, "args": args})
        wire = self._socket
        answered = False
        try:
            if wire is None:
                raise ConnectionError("closed")
            greet.send(wire, frame, deadline)
            answer = self._opener.open(greet.receive(wire, frames.MAX_FRAME_BYTES, deadline))
            answered = True
        except TimeoutError:
            raise Unreached(
                f"{method}: the coordinator at {self.address} did not answer in time",
                remedy="It may be stopped or overloaded; its log is logs/coordinator-0.log in the run folder.",
            ) from None
        except OSError as error:
            raise Unreached(
                f"{method}: the connection to the coordinator at {self.address} broke: {error}"
            ) from None
        finally:
            if not answered:  # whatever interrupted us, the next answer would be of the wrong call
                self._drop()
        try:
            return calls.read_answer(answer, id)
        except WireError:
            self._drop()
            raise

    def _open(self, deadline: Deadline) -> None:
        """Tries until it works, the token is refused, or the deadline passes."""
        pause = threading.Event()
        while True:
            try:
                return self._try_open(deadline)
            except AuthError as error:
                raise AuthError(f"{self.address}: {error.message}", remedy=error.remedy) from None
            except (OSError, WireError) as error:
                if deadline.left_s <= RETRY_S or isinstance(error, socket.gaierror):
                    raise self._explain(error) from None
            pause.wait(RETRY_S)
            if self._closed:
                raise WorldError(f"the connection to {self.address} was closed while it was being made")

    def _try_open(self, deadline: Deadline) -> None:
        host, port = net.split(self.address)
        wire = socket.create_connection((host, port), timeout=max(0.001, min(CONNECT_S, deadline.left_s)))
        try:
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            session = greet.greet(wire, self._token, self.identity, deadline)
        except BaseException:
            wire.close()
            raise
        self._sealer, self._opener = frames.Sealer(session.from_client), frames.Opener(session.from_server)
        self._socket = wire

    def _explain(self, error: Exception) -> EchelonError:
        host, _ = net.split(self.address)
        if isinstance(error, socket.gaierror):
            return Unreached(
                f"{self.address}: the name {host!r} has no address (DNS): {error.strerror}",
                remedy="Give the address in numbers, or add the name to /etc/hosts.",
            )
        try:
            way = f"from {net.local_address(host)} over {net.interface_to(host)}"
        except EchelonError:
            way = "and there is no route to it"
        if isinstance(error, TimeoutError):
            found, remedy = (
                "no answer (timeout)",
                "A firewall may drop the packets: choose the interface with --listen ADDR.",
            )
        elif isinstance(error, ConnectionRefusedError):
            found, remedy = "refused", "Nothing listens there: is the run still going (`echelon runs`)?"
        else:
            found, remedy = (
                str(error) or type(error).__name__,
                "The coordinator may be ending, or its port was taken.",
            )
        told = Unreached(f"the coordinator at {self.address} cannot be reached {way}: {found}", remedy=remedy)
        told.refused = isinstance(error, ConnectionRefusedError)
        return told

    def _drop(self) -> None:
        held, self._socket = self._socket, None
        if held is not None:
            with contextlib.suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)
            held.close()


def _ended(wire: socket.socket) -> bool:
    """Has the other side hung up since the last answer? Between calls nothing else can be there to read."""
    try:
        wire.settimeout(0)
        wire.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
