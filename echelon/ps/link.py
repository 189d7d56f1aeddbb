"""Link: the client's end of one connection to one parameter server. Calls go out at once, answers come in any order.

On the server's own host large tensors lie in memory that both sides map, and only their places travel; across hosts they follow the
frame. A thread a link takes the answers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.clock import Deadline
from echelon.control import calls, forks
from echelon.control.handshake import Identity
from echelon.errors import EchelonError, Late, LinkLost, UsageError, WireError
from echelon.native.spread import copy
from echelon.ps import frame
from echelon.ps.frame import At, Limits
from echelon.ps.memory import CODES, TORCH, Arena, raw
from echelon.ps.outbox import SMALL_BYTES, Outbox, Part
from echelon.ps.pending import Pending, Reply, again
from echelon.ps.reach import Reached, reach

INLINE_BYTES = 16 * 1024
"""On one host, a tensor up to this travels in the frame: cheaper than a place in shared memory."""

ROOM_S = 60.0
"""How long call() waits for answers when too much is under way, unless it is told otherwise."""

Tensors = Tensor | Sequence[Tensor] | None

__all__ = ["Link", "Pending", "Reply"]


class Link:
    """A connection to one server. Thread-safe. After LinkLost it stays lost: make another. In a forked child it is closed."""

    def __init__(self, reached: Reached, limits: Limits) -> None:
        self.server, self.limits, self.welcome = reached.address.plain, limits, reached.welcome
        self.local = reached.wire.family == socket.AF_UNIX
        self._wire, self._inbox = reached.wire, reached.inbox
        self._outbox = Outbox(self._wire, limits, f"ps-send-{self.server}", self._broken)
        self._arena = Arena(self._announce, limits)
        self._callbacks = threading.Lock()
        self._room = threading.Condition(threading.Lock())
        self._waiting = 0
        self._open: dict[int, Pending] = {}
        self._open_bytes = self._next = 0
        self.moved_bytes = 0
        """Of the tensors that calls took along and made room for so far, whichever way these travel."""
        self._lost: LinkLost | None = None
        self._reason = ""
        self._pid = os.getpid()
        forks.register(self)
        self._reader = threading.Thread(target=self._read, name=f"ps-link-{self.server}", daemon=True)
        self._reader.start()

    @classmethod
    def connect(
        cls,
        address: str,
        token: str,
        identity: Identity,
        deadline: Deadline,
        *,
        limits: Limits | None = None,
        shared: bool = True,
    ) -> Link:
        """Connects and authenticates both ways; a server that is not there yet is waited for until the deadline. `shared=False` goes
        over TCP even on one host."""
        limits = limits or Limits()
        return cls(reach(address, token, identity, deadline, limits=limits, shared=shared), limits)

    @property
    def lost(self) -> LinkLost | None:
        """Why it is over, None while it is not."""
        return self._lost

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Received and sent over the socket; what lies in shared memory does not count."""
        return self._inbox.num_bytes, self._outbox.num_bytes

    def buffer(self, num_bytes: int) -> Tensor:
        """uint8, at a multiple of 64 bytes, shared with the server if it is on this host: payloads and outs that are views of it
        travel without a copy. It is there as long as anything views it; release() makes it free for other buffers."""
        if self._lost is not None:
            raise again(self._lost)
        if self.local:
            return self._arena.take(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    def landing(self, num_bytes: int) -> Tensor:
        """uint8 for one answer that its caller keeps: shared with the server where that saves a copy, and free again by itself once nothing
        views it; else ordinary memory."""
        lent = self._arena.lend(num_bytes) if self.local and num_bytes > INLINE_BYTES else None
        return torch.empty(num_bytes, dtype=torch.uint8) if lent is None else lent

    def share_with(self, others: Sequence[Link]) -> None:
        """Buffers that are made from now on are shared with these links' servers as well, where they are on this host."""
        if self.local:
            self._arena.share_with([other._arena for other in others if other.local])

    def release(self, buffer: Tensor) -> None:
        """Gives back what buffer() gave, once no call uses it. What came from elsewhere is ignored."""
        self._arena.give(buffer)

    def call(
        self,
        verb: str,
        head: dict[str, Any],
        payload: Tensors = None,
        out: Tensors = None,
        deadline: Deadline | None = None,
    ) -> Pending:
        """Sends "service.verb" with tensors (contiguous, on the CPU, of any type). Never waits for its answer; when too much is under
        way, it waits for others', and is Late if that takes until the deadline (from a then(), it never waits).

        `payload` and `out` belong to the wire until it is done. The answer has as many tensors as `out`, each of the same bytes, or
        none; without `out` they come in the Reply.
        """
        pending = Pending(self.server, self._callbacks, verb)
        tensors = _listed(payload)
        try:
            ats, parts, inline = self._place(tensors, pending)
            outs = _listed(out)
            rooms = self._make_room(outs, pending) if outs else []
            pending.num_bytes = inline + sum(size for size, segment, _ in rooms if segment == frame.INLINE)
            moved = sum(x.nbytes for x in tensors) + sum(size for size, *_ in rooms)
            number = self._admit(pending, moved, deadline)
        except BaseException:
            self._give_back(pending)
            raise
        try:
            first = frame.pack(frame.CALL, number, [verb, head, ats, rooms], inline)
            self._check(len(first), inline)
        except BaseException as error:
            self._complete(number, pending, None, UsageError(f"{verb}: {error}"))
            raise
        if inline <= SMALL_BYTES and parts:
            first, parts = b"".join([first, *parts]), []
        self._outbox.send([first, *parts], len(first) + (inline if parts else 0), keep=tensors)
        return pending

    def close(self) -> None:
        """Ends the connection; calls under way are lost. May be called again."""
        if self._pid != os.getpid():
            return
        self._reason = self._reason or "it was closed here"
        with contextlib.suppress(OSError):
            self._wire.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join(10)
        self._outbox.join(10)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def after_fork(self) -> None:
        self._callbacks, self._room = threading.Lock(), threading.Condition(threading.Lock())
        self._outbox.after_fork()
        self._arena.after_fork()
        self._lost = LinkLost(
            f"the connection to the parameter server at {self.server} belongs to the parent process",
            remedy="A forked child makes its own.",
        )
        with contextlib.suppress(OSError):
            self._wire.close()

    # what goes

    def _place(self, tensors: list[Tensor], pending: Pending) -> tuple[list[list[Any]], list[Part], int]:
        """Where each tensor travels: in shared memory, or in the payload, whose parts and length these are."""
        ats: list[list[Any]] = []
        parts: list[Part] = []
        end = 0
        for x in tensors:
            size, code = x.nbytes, CODES.get(x.dtype)
            if code is None or x.device.type != "cpu" or not x.is_contiguous():
                raise _unfit(x)
            if self.local and size > INLINE_BYTES:
                at = self._arena.find(x.data_ptr(), size)
                if at is None:
                    at, stage = self._stage(size, pending)
                    copy(stage, x)
                else:
                    pending.held.append(x)
                ats.append([code, list(x.shape), *at])
                continue
            ats.append([code, list(x.shape), frame.INLINE, 0])
            begin = frame.aligned(end)
            if begin > end:
                parts.append(bytes(begin - end))
            if size:
                parts.append(raw(x))
            end = begin + size
        return ats, parts, end

    def _make_room(self, outs: list[Tensor], pending: Pending) -> list[list[int]]:
        """Where the tensors of the answer are to be put."""
        rooms = []
        pending.rooms = []
        for x in outs:
            size, stage, at = x.nbytes, None, (frame.INLINE, 0)
            if x.dtype not in CODES or x.device.type != "cpu" or not x.is_contiguous():
                raise _unfit(x)
            if self.local and size > INLINE_BYTES:
                found = self._arena.find(x.data_ptr(), size)
                at, stage = (found, None) if found is not None else self._stage(size, pending)
            pending.rooms.append((x, stage))
            rooms.append([size, *at])
        return rooms

    def _stage(self, size: int, pending: Pending) -> tuple[tuple[int, int], Tensor]:
        """Shared memory for what does not lie there, until the call is done."""
        stage = self._arena.take(size)
        pending.staged.append(stage)
        at = self._arena.find(stage.data_ptr(), size)
        assert at is not None
        return at, stage

    def _announce(self, fd: int, size: int) -> None:
        data = frame.pack(frame.SEGMENT, 0, [size])
        self._outbox.send([data], len(data), lambda: os.close(fd), fds=[fd])

    def _check(self, head_bytes: int, payload_bytes: int) -> None:
        if head_bytes > self.limits.head_bytes or payload_bytes > self.limits.payload_bytes:
            raise UsageError(
                f"a head of {head_bytes} and a payload of {payload_bytes} bytes are over what one call carries "
                f"({self.limits.head_bytes} and {self.limits.payload_bytes})",
                remedy="Cut it into several calls.",
            )

    # how much is under way

    def _admit(self, pending: Pending, moved: int, deadline: Deadline | None) -> int:
        with self._room:
            if not self._fits(pending) and threading.current_thread() is not self._reader:
                deadline = deadline or Deadline.after(ROOM_S)
                self._waiting += 1
                try:
                    self._room.wait_for(lambda: self._fits(pending), deadline.left_s)
                finally:
                    self._waiting -= 1
                if not self._fits(pending):
                    raise Late(
                        f"{pending.verb}: {len(self._open)} calls of {self._open_bytes >> 20} MiB are unanswered by the parameter "
                        f"server at {self.server}",
                        remedy="It may be stopped or overloaded, or waiting for another worker.",
                    )
            if self._lost is not None:
                raise again(self._lost)
            number, self._next = self._next, self._next + 1
            self._open[number] = pending
            self.moved_bytes += moved
            self._open_bytes += pending.num_bytes
            return number

    def _fits(self, pending: Pending) -> bool:
        if not self._open or self._lost is not None:
            return True
        limits = self.limits
        return (
            len(self._open) < limits.in_flight_calls
            and self._open_bytes + pending.num_bytes <= limits.in_flight_bytes
        )

    def _complete(
        self, number: int, pending: Pending, reply: Reply | None, error: EchelonError | None
    ) -> None:
        with self._room:
            if self._open.pop(number, None) is None:
                return
            self._open_bytes -= pending.num_bytes
            if self._waiting:
                self._room.notify_all()
        if self._lost is None:
            self._give_back(pending)
        pending.finish(reply, error)

    def _give_back(self, pending: Pending) -> None:
        for stage in pending.staged:
            self._arena.give(stage)
        pending.staged = []

    # what comes

    def _read(self) -> None:
        try:
            while (head := self._inbox.header()) is not None:
                self._take(head)
        except (OSError, EOFError) as error:
            self._reason = self._reason or str(error)
        except WireError as error:
            self._reason = f"it sent what makes no sense: {error.message}"
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._reason = f"reading from it failed: {error}"
        self._lose(self._reason or "it hung up; its process may have died")

    def _take(self, head: frame.Header) -> None:
        said = frame.unpack(self._inbox.take(head.head_bytes))
        if head.kind == frame.BYE:
            self._reason = str(said[0])[:1000] if isinstance(said, list) and said else "it said goodbye"
            self._inbox.skip(head.payload_bytes)
            return
        pending = self._open.get(head.call)
        if pending is None or head.kind not in (frame.ANSWER, frame.REFUSAL):
            raise WireError(f"a frame of kind {head.kind} for call {head.call}, which is not under way")
        if head.kind == frame.REFUSAL:
            self._inbox.skip(head.payload_bytes)
            try:
                calls.read_answer({"id": 0, "error": said}, 0)
            except EchelonError as error:
                self._complete(head.call, pending, None, error)
            return
        told, ats = frame.read_answer(said, head.payload_bytes)
        reply = Reply(told, self._receive(ats, pending))
        self._complete(head.call, pending, reply, None)

    def _receive(self, ats: list[At], pending: Pending) -> list[Tensor]:
        """The tensors of an answer, in `out` where the call gave one."""
        if pending.rooms is not None and not ats:
            return []
        found: list[Tensor] = []
        if pending.rooms is None:
            if any(at.segment != frame.INLINE for at in ats):
                raise WireError(f"{pending.verb} was answered in memory that it did not give")
            found = [torch.empty(at.shape, dtype=TORCH[at.dtype]) for at in ats]
            rooms: list[tuple[Tensor, Tensor | None]] = [(x, None) for x in found]
        else:
            rooms = pending.rooms
        if [x.nbytes for x, _ in rooms] != [at.num_bytes for at in ats]:
            raise WireError(f"{pending.verb} was answered with other tensors than there is room for")
        taken = 0
        for at, (x, stage) in zip(ats, rooms, strict=True):
            if at.segment == frame.INLINE:
                self._inbox.skip(at.offset - taken)
                self._inbox.into(raw(x))
                taken = at.offset + at.num_bytes
            elif stage is not None:
                copy(x, stage)
        return found

    def _broken(self, error: Exception) -> None:
        """Sending failed. What the server said before it hung up may still be read."""
        self._reason = self._reason or str(error)
        with contextlib.suppress(OSError):
            self._wire.shutdown(socket.SHUT_RD)

    def _lose(self, reason: str) -> None:
        with self._room:
            self._lost = LinkLost(
                f"the connection to the parameter server at {self.server} is gone: {reason}",
                remedy="Its own log or terminal says more.",
            )
            lost, self._open, self._open_bytes = self._open, {}, 0
            self._room.notify_all()
        with contextlib.suppress(OSError):
            self._wire.shutdown(socket.SHUT_RDWR)
        self._outbox.close()
        self._outbox.join(2)
        self._wire.close()
        self._arena.close()
        for pending in lost.values():
            pending.finish(None, self._lost)


def _listed(tensors: Tensors) -> list[Tensor]:
    if tensors is None:
        return []
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _unfit(x: Tensor) -> UsageError:
    return UsageError(
        f"a {str(x.dtype).removeprefix('torch.')} tensor of shape {list(x.shape)} on {x.device} cannot travel"
        f"{'' if x.is_contiguous() else ': it is strided'}",
        remedy="Give contiguous tensors on the CPU: x.detach().cpu().contiguous().",
    )
