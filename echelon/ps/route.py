"""The way to whichever server leads a shard: a Link that survives the death of its server.

Calls are logged until they cannot be needed again. When the server is gone, the run's coordinator says who leads the shard now; that
one is told so, and gets the logged calls in their order. It knows which of them are in an update already (session.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from echelon.clock import Deadline
from echelon.errors import LinkLost
from echelon.ps.link import Link, Tensors
from echelon.ps.pending import Pending, Reply

UNTIL_APPLIED = frozenset({"train.push", "train.back", "train.squares"})
"""Answered or not, a new leader needs these again until the update that they belong to is made. What others did is in every copy when they
are answered."""


class Routed:
    """A call under way, whoever answers it (pending.Answered)."""

    def __init__(self, route: Route, verb: str, head: dict[str, Any], payload: Tensors, out: Tensors) -> None:
        self.verb, self.head, self.payload, self.out = verb, head, payload, out
        self.pending: Pending | None = None
        self.reply: Reply | None = None
        self.used: set[int] = set()
        """Keys of a push that an update has used, while others of it wait for theirs."""
        self._route = route

    @property
    def done(self) -> bool:
        """Answered, or refused; not when its server is gone."""
        pending = self.pending
        return self.reply is not None or (pending is not None and pending.done and not pending.lost)

    def wait(self, deadline: Deadline) -> Reply:
        """See Pending.wait. LinkLost when nobody serves the shard any more."""
        while self.reply is None:
            pending = self.pending
            try:
                if pending is None:
                    raise LinkLost("not sent")
                reply = pending.wait(deadline)
            except LinkLost:
                self._route.recover(self, pending)
                continue
            self.reply = reply
            self._route.answered(self)
        return self.reply

    def revive(self) -> None:
        """If its server is gone, it goes to the next one, also if nobody waits for it yet. Raises LinkLost when nobody serves the shard."""
        pending = self.pending
        if self.reply is None and (pending is None or pending.lost):
            self._route.recover(self, pending)

    def send(self, link: Link) -> None:
        head = {**self.head, "used": sorted(self.used)} if self.used else self.head
        pending = link.call(self.verb, head, self.payload, self.out)
        if self.reply is None:
            self.pending = pending


class Route:
    """Looks like a Link to whoever calls. `find(shard, epoch)` gives a connection to who leads the shard in a later epoch, and that epoch."""

    def __init__(
        self, shard: int, link: Link, epoch: int, find: Callable[[int, int], tuple[Link, int]]
    ) -> None:
        self.shard, self.link, self.epoch, self._find = shard, link, epoch, find
        self.moves = 0
        """How often another server took over: buffers of before are not shared with it."""
        self._log: list[Routed] = []
        self._moved_before = 0
        self._lock = threading.RLock()

    @property
    def server(self) -> str:
        return self.link.server

    @property
    def moved_bytes(self) -> int:
        """See Link: with all servers together."""
        return self._moved_before + self.link.moved_bytes

    @property
    def local(self) -> bool:
        return self.link.local

    def buffer(self, num_bytes: int) -> Tensor:
        """See Link.buffer; while nobody leads the shard, memory that is not shared."""
        try:
            return self.link.buffer(num_bytes)
        except LinkLost:
            return torch.empty(num_bytes, dtype=torch.uint8)

    def release(self, buffer: Tensor) -> None:
        self.link.release(buffer)

    def call(self, verb: str, head: dict[str, Any], payload: Tensors = None, out: Tensors = None) -> Routed:
        """See Link.call."""
        made = Routed(self, verb, {**head, "shard": self.shard}, payload, out)
        with self._lock:
            self._log.append(made)
            try:
                made.send(self.link)
            except LinkLost:
                pass  # whoever waits for it finds the next leader
        return made

    def answered(self, call: Routed) -> None:
        """Forgets what no leader can need again."""
        with self._lock:
            if call.verb in UNTIL_APPLIED:
                return
            self._log.remove(call)
            if call.verb == "train.apply":
                groups, unused = call.head["groups"], call.head["unused"]
                used = {key for _, _, keys in groups for key in keys} | set(unused)
                self._log = [one for one in self._log if not one.done]
                for one in self._log:
                    if one.verb == "train.push":
                        one.used |= used & {key for keys in one.head["keys"] for key in keys}

    def renew(self) -> None:
        """A new term: what was pushed is void."""
        with self._lock:
            self._log.clear()

    def recover(self, call: Routed, seen: Pending | None) -> None:
        """The server of this call is gone: goes on with its successor. Raises LinkLost when there is none."""
        with self._lock:
            if call.pending is not seen:
                return  # somebody was faster
            if call not in self._log:
                raise LinkLost(f"{call.verb} was given up: a new term of the run has begun")
            while True:
                link, self.epoch = self._find(self.shard, self.epoch)
                self.link.close()
                self._moved_before += self.link.moved_bytes
                self.link = link
                self.moves += 1
                try:
                    for call in self._log:
                        call.send(link)
                    return
                except LinkLost:
                    continue

    def close(self) -> None:
        self.link.close()
