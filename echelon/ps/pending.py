"""A call to a parameter server that is under way, and what comes of it."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from echelon.clock import Deadline
from echelon.errors import EchelonError, Late, LinkLost


@dataclass(frozen=True)
class Reply:
    """What a server answered. `tensors` is empty where the call gave an `out`: it is in there."""

    head: dict[str, Any]
    tensors: list[Tensor]


class Answered(Protocol):
    """What can be waited for: a Pending, or several as one."""

    def wait(self, deadline: Deadline) -> Reply: ...


class Pending:
    """A call under way. Its tensors are the wire's until it is done."""

    __slots__ = (
        "_done",
        "_error",
        "_lock",
        "_reply",
        "_then",
        "held",
        "num_bytes",
        "rooms",
        "server",
        "staged",
        "verb",
    )

    def __init__(self, server: str, lock: threading.Lock, verb: str) -> None:
        self.server, self._lock, self.verb = server, lock, verb
        self._done = threading.Lock()
        self._done.acquire()
        self._reply: Reply | None = None
        self._error: EchelonError | None = None
        self._then: list[Callable[[], None]] = []
        self.rooms: list[tuple[Tensor, Tensor | None]] | None = None
        self.staged: list[Tensor] = []
        self.held: list[Tensor] = []
        """What the server reads where it lies: it may be lent memory, which is free as soon as nobody holds it."""
        self.num_bytes = 0

    @property
    def done(self) -> bool:
        return self._reply is not None or self._error is not None

    @property
    def failed(self) -> bool:
        return self._error is not None

    @property
    def lost(self) -> bool:
        """Over, because the connection is."""
        return isinstance(self._error, LinkLost)

    def wait(self, deadline: Deadline) -> Reply:
        """Blocks until the answer is there. Raises the server's error, LinkLost when the connection is gone, Late at the deadline
        (the call may still happen, and its tensors stay the wire's)."""
        if not self.done:
            if not self._done.acquire(timeout=min(deadline.left_s, threading.TIMEOUT_MAX)):
                raise Late(
                    f"{self.verb}: the parameter server at {self.server} did not answer in time",
                    remedy="It may be stopped, overloaded, or waiting for another worker.",
                )
            self._done.release()
        if self._error is not None:
            raise again(self._error)
        assert self._reply is not None
        return self._reply

    def then(self, fn: Callable[[], None]) -> None:
        """Calls fn() once when this is done, from the link's thread; at once, from here, if it is."""
        with self._lock:
            if not self.done:
                self._then.append(fn)
                return
        fn()

    def finish(self, reply: Reply | None, error: EchelonError | None) -> None:
        """Called once, by the link."""
        self.rooms, self.held = None, []
        with self._lock:
            self._reply, self._error = reply, error
            then, self._then = self._then, []
        self._done.release()
        for fn in then:
            try:
                fn()
            except Exception:
                traceback.print_exc(file=sys.stderr)


def again(error: EchelonError) -> EchelonError:
    """A fresh error to raise: one that several threads raise would gather all their tracebacks."""
    fresh = type(error)(
        error.message, remedy=error.remedy, rank=error.rank, step=error.step, peers=error.peers
    )
    fresh.__cause__ = error.__cause__
    return fresh
