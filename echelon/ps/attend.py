"""One connection of a Host: a client that is greeted, read, called for and answered."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from echelon.clock import Deadline
from echelon.control import calls, greet
from echelon.errors import EchelonError, UsageError, WireError
from echelon.native.spread import copy
from echelon.ps import frame
from echelon.ps.frame import At, Header, Limits, Room
from echelon.ps.inbox import Inbox, prepare
from echelon.ps.memory import CODES, TORCH, Mapped, Pool, raw, tensor_of
from echelon.ps.outbox import SMALL_BYTES, Outbox, Part
from echelon.ps.service import Counters, Peer, Request, Service

LAST_WORDS_S = 1.0
UINT8 = frame.DTYPES.index(("uint8", 1))


class Owner(Protocol):
    """What a connection needs of its host."""

    limits: Limits
    counters: Counters
    pool: Pool
    id: str

    @property
    def services(self) -> Mapping[str, Service]: ...

    @property
    def address(self) -> str: ...


class Connection:
    """Owned by its thread; answers come from any."""

    def __init__(self, host: Owner, wire: socket.socket, number: int) -> None:
        self._host, self._wire, self.number = host, wire, number
        self._limits = host.limits
        self._local = wire.family == socket.AF_UNIX
        self.peer = Peer("", 0, 0, number, self._local)
        self._shared = Mapped(self._limits)
        self._room = threading.Condition(threading.Lock())
        self._open: dict[int, Request] = {}
        self._open_calls = self._open_bytes = 0
        self._over = False
        self._reason = ""
        self._thread: threading.Thread | None = None
        self._outbox = Outbox(wire, self._limits, f"ps-answer-{number}", self._broken)
        self._inbox = Inbox(wire, self._limits, self._outbox.flush, takes_fds=self._local)

    def start(self, attend: Callable[[Connection], None]) -> None:
        self._thread = threading.Thread(
            target=attend, args=(self,), name=f"ps-serve-{self.number}", daemon=True
        )
        self._thread.start()

    def greet(self, token: str, run: str) -> None:
        """The handshake, within limits.handshake_s, and the welcome."""
        _, who = greet.admit(self._wire, token, run, Deadline.after(self._limits.handshake_s))
        self.peer = Peer(who.role, who.rank, who.incarnation, self.number, self._local)
        prepare(self._wire)
        _, _, where = self._host.address.partition("/")
        name, _, memory = where.partition("@")
        about = {"id": self._host.id, "name": name, "memory": memory, "services": sorted(self._host.services)}
        said = frame.pack(frame.WELCOME, 0, about)
        self._outbox.send([said], len(said))

    def converse(self) -> None:
        """Frames until one side hangs up; whatever is wrong with one ends this connection and nothing else."""
        reason = ""
        try:
            while (head := self._inbox.header()) is not None:
                if head.kind == frame.CALL:
                    self._call(head)
                elif head.kind == frame.SEGMENT:
                    self._share(head)
                elif head.kind == frame.BYE:
                    break
                else:
                    raise WireError(f"a client does not send frames of kind {head.kind}")
        except WireError as error:
            reason = f"what came made no sense: {error.message}"
        except (OSError, EOFError) as error:
            reason = str(error)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            reason = "the server failed; its log says more"
        if reason:
            self.end(reason)

    def end(self, reason: str) -> None:
        """Says goodbye and hangs up; its thread notices."""
        self.say_goodbye(reason)
        self.hang_up(Deadline.after(LAST_WORDS_S))

    def say_goodbye(self, reason: str) -> None:
        self._reason = self._reason or reason
        data = frame.pack(frame.BYE, 0, [self._reason])
        self._outbox.send([data], len(data))

    def hang_up(self, deadline: Deadline) -> None:
        """Once everything was sent, or the deadline passed."""
        self._outbox.drain(deadline.left_s)
        self._cut()

    def over(self) -> None:
        """The last thing on its thread."""
        with self._room:
            self._over = True
            self._open = {}
            self._room.notify_all()
        self._cut()
        self._outbox.close()
        self._outbox.join(2)
        self._inbox.close()
        self._shared.close()
        self._wire.close()
        if self.peer.role:
            for service in self._host.services.values():
                try:
                    service.gone(self.peer)
                except Exception:
                    traceback.print_exc(file=sys.stderr)

    def join(self, deadline: Deadline) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(deadline.left_s)

    def after_fork(self) -> None:
        self._room = threading.Condition(threading.Lock())
        self._over = True
        self._outbox.after_fork()
        with contextlib.suppress(OSError):
            self._wire.close()

    # what comes

    def _share(self, head: Header) -> None:
        said = frame.unpack(self._inbox.take(head.head_bytes))
        if head.payload_bytes or type(said) is not list or len(said) != 1 or type(said[0]) is not int:
            raise WireError("shared memory of the wrong form")
        self._shared.add(self._inbox.claim_fd(), said[0])

    def _call(self, head: Header) -> None:
        verb, said, ats, rooms = frame.read_call(
            frame.unpack(self._inbox.take(head.head_bytes)), head.payload_bytes
        )
        if head.call in self._open:
            raise WireError(f"call {head.call} came a second time")
        num_bytes = head.payload_bytes + sum(room.num_bytes for room in rooms if room.segment == frame.INLINE)
        if num_bytes > 2 * self._limits.payload_bytes:
            raise WireError(f"a call of {num_bytes} bytes")
        self._admit(num_bytes)
        buffer, tensors = self._receive(ats, head.payload_bytes)
        name, _, verb = verb.partition(".")
        request = Request(self, self.peer, head.call, verb, said, tensors, rooms)
        request._buffer, request.num_bytes = buffer, num_bytes
        for room in rooms:
            if room.segment != frame.INLINE:
                self._view(room)
        self._open[head.call] = request
        counters = self._host.counters
        counters.calls += 1
        counters.bytes_in += sum(at.num_bytes for at in ats)
        service = self._host.services.get(name)
        try:
            if service is None:
                raise UsageError(
                    f"this server offers no {name[:80]!r}",
                    remedy=f"It offers {', '.join(sorted(self._host.services)) or 'nothing'}.",
                )
            service.called(request)
        except EchelonError as error:
            request.refuse(error)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            request.refuse(
                EchelonError(
                    f"{name}.{verb} failed in the server: {type(error).__name__}", remedy="See its log."
                )
            )

    def _receive(self, ats: list[At], payload_bytes: int) -> tuple[Tensor | None, list[Tensor]]:
        buffer: Tensor | None = None
        source: Any = None
        if payload_bytes > SMALL_BYTES:
            buffer = self._host.pool.take(payload_bytes)
            source = raw(buffer)[:payload_bytes]
            self._inbox.into(source)
        elif payload_bytes:
            source = bytearray(self._inbox.take(payload_bytes))
        tensors = []
        for at in ats:
            if at.segment != frame.INLINE:
                tensors.append(self._shared.view(at.segment, at.offset, at.num_bytes, at.dtype, at.shape))
            elif buffer is not None:
                held = buffer[at.offset : at.offset + at.num_bytes]
                tensors.append(held.view(TORCH[at.dtype]).view(at.shape))
            else:
                tensors.append(tensor_of(source, at.dtype, at.shape, at.offset))
        return buffer, tensors

    def _admit(self, num_bytes: int) -> None:
        """Reads no further while this client has too much under way: it notices by not being able to send."""
        while not self._entered(num_bytes):
            self._outbox.flush()  # answers that were held back may be all that is under way
            with self._room:
                if not self._fits(num_bytes):
                    self._room.wait(1.0)

    def _entered(self, num_bytes: int) -> bool:
        with self._room:
            if not self._fits(num_bytes):
                return False
            self._open_calls += 1
            self._open_bytes += num_bytes
            return True

    def _fits(self, num_bytes: int) -> bool:
        """Twice what a proper client has under way, which counts a little differently."""
        if self._over or not self._open_calls:
            return True
        return (
            self._open_calls < 2 * self._limits.in_flight_calls
            and self._open_bytes + num_bytes <= 2 * self._limits.in_flight_bytes
        )

    # what goes

    def _view(self, room: Room) -> Tensor:
        return self._shared.view(room.segment, room.offset, room.num_bytes, UINT8, [room.num_bytes])

    def room(self, rooms: list[Room]) -> tuple[list[Tensor], Tensor | None]:
        """Memory for an answer, and the buffer that holds what goes over the socket."""
        offsets, total = frame.placed([r.num_bytes for r in rooms if r.segment == frame.INLINE])
        over = any(r.segment == frame.INLINE for r in rooms)
        buffer = self._host.pool.take(total) if over else None
        places = iter(offsets)
        found = []
        for r in rooms:
            if r.segment != frame.INLINE:
                found.append(self._view(r))
            elif buffer is not None:
                at = next(places)
                found.append(buffer[at : at + r.num_bytes])
        return found, buffer

    def answer(
        self,
        request: Request,
        head: dict[str, Any],
        tensors: Sequence[Tensor],
        sent: Callable[[], None] | None,
    ) -> None:
        self._open.pop(request._number, None)
        if self._over:
            self._done(request, sent)
            return
        try:
            data, parts, num_bytes, keep = self._answer_frame(request, head, tensors, copied=sent is None)
        except EchelonError as error:
            self.refuse(request, error, sent)
            return
        self._host.counters.bytes_out += sum(x.nbytes for x in tensors)
        self._outbox.send(
            [data, *parts],
            num_bytes,
            lambda: self._done(request, sent),
            keep=keep,
            wait=self._more_is_coming(),
        )

    def _answer_frame(
        self, request: Request, head: dict[str, Any], tensors: Sequence[Tensor], *, copied: bool
    ) -> tuple[bytes, list[Part], int, object]:
        """(header and head, the payload's parts, bytes in all, what must live until they are sent)."""
        rooms = request._rooms
        tensors = [x if x.is_contiguous() else x.contiguous() for x in tensors]
        if rooms and tensors and [x.nbytes for x in tensors] != [r.num_bytes for r in rooms]:
            raise UsageError(
                f"{request.verb} is answered with {[x.nbytes for x in tensors]} bytes, and the client has room for "
                f"{[r.num_bytes for r in rooms]}",
                remedy="Give `out` tensors of the shape and type of what is asked for.",
            )
        ats, over = [], []
        for i, x in enumerate(tensors):
            if rooms and rooms[i].segment != frame.INLINE:
                copy(self._view(rooms[i]), x)
                ats.append([CODES[x.dtype], list(x.shape), rooms[i].segment, rooms[i].offset])
            else:
                ats.append([CODES[x.dtype], list(x.shape), frame.INLINE, 0])
                over.append(x)
        offsets, total = frame.placed([x.nbytes for x in over])
        data = frame.pack(frame.ANSWER, request._number, [head, ats], total)
        if total > self._limits.payload_bytes or len(data) > self._limits.head_bytes:
            raise UsageError(
                f"the answer to {request.verb} has a head of {len(data)} and a payload of {total} bytes, more than one frame carries",
                remedy="Ask for less at a time.",
            )
        if not total:
            return data, [], len(data), None
        if not rooms:  # not announced by the client, so not counted yet
            with self._room:
                request.num_bytes += total
                self._open_bytes += total
        parts, keep = self._payload(request, over, offsets, total, copied)
        if total <= SMALL_BYTES:
            data, parts = b"".join([data, *parts]), []
        return data, parts, len(data) + (total if parts else 0), keep

    def _payload(
        self, request: Request, over: list[Tensor], offsets: list[int], total: int, copied: bool
    ) -> tuple[list[Part], object]:
        room = request._room[1] if request._room is not None else None
        if total > SMALL_BYTES and copied:  # the caller's tensors may change as soon as answer() returns
            if room is None:
                room = self._host.pool.take(total)
                request._room = ([], room)
            for x, at in zip(over, offsets, strict=True):
                copy(room[at : at + x.nbytes], x)
            return [raw(room)[:total]], room
        parts: list[Part] = []
        end = 0
        for x, at in zip(over, offsets, strict=True):
            parts += [bytes(at - end), raw(x)]
            end = at + x.nbytes
        return parts, over

    def refuse(self, request: Request, error: EchelonError, sent: Callable[[], None] | None = None) -> None:
        self._open.pop(request._number, None)
        data = frame.pack(frame.REFUSAL, request._number, calls.error_answer(0, error)["error"])
        self._outbox.send([data], len(data), lambda: self._done(request, sent), wait=self._more_is_coming())

    def _done(self, request: Request, sent: Callable[[], None] | None) -> None:
        """Its answer is gone, or goes nowhere: what it held is free."""
        buffer, request._buffer = request._buffer, None
        if buffer is not None:
            self._host.pool.give(buffer)
        room, request._room = request._room, None
        if room is not None and room[1] is not None:
            self._host.pool.give(room[1])
        with self._room:
            self._open_calls -= 1
            self._open_bytes -= request.num_bytes
            self._room.notify_all()
        if sent is not None:
            sent()

    def _more_is_coming(self) -> bool:
        """Answers to small calls that came together go together."""
        return self._inbox.has_more and threading.current_thread() is self._thread

    def _broken(self, error: Exception) -> None:
        self._reason = self._reason or str(error)
        self._cut()

    def _cut(self) -> None:
        with contextlib.suppress(OSError):
            self._wire.shutdown(socket.SHUT_RDWR)
