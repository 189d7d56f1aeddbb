"""The way to a server, as it looks while nothing counts: calls are answered at once, and never leave this process.

A worker that was started again runs its script up to the others' place, and those who lost a step the rest of its iteration: gradients
that they push and norms that they ask for on the way must not reach the servers, where the others would wait for them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from echelon.clock import Deadline
from echelon.ps.link import Link
from echelon.ps.pending import Reply
from echelon.ps.route import Route


class Pretended:
    """A call that was answered when it was made (pending.Answered)."""

    done = True
    failed = lost = False

    def __init__(self, head: dict[str, Any]) -> None:
        self.reply = Reply(head, [])

    def wait(self, deadline: Deadline) -> Reply:
        return self.reply


class Pretending:
    """Looks like a Link; its memory is that of the real one."""

    def __init__(self, way: Link | Route) -> None:
        self.way = way

    @property
    def server(self) -> str:
        return self.way.server

    @property
    def local(self) -> bool:
        return self.way.local

    def buffer(self, num_bytes: int) -> Tensor:
        return self.way.buffer(num_bytes)

    def release(self, buffer: Tensor) -> None:
        self.way.release(buffer)

    def call(self, verb: str, head: dict[str, Any], payload: Any = None, out: Any = None) -> Pretended:
        """`out` stays as it is."""
        squares = [0.0 for _ in head.get("keys", ())]
        return Pretended({"updates": 0, "held": False, "squares": squares, "finite": True, "state": []})

    def close(self) -> None:
        self.way.close()
