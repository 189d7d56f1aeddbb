"""Sums at one server, so many under way at a time: no worker runs ahead of the others.

A server sums a message when every worker's has come. Streams that meet in its link share it unevenly for seconds; without a
window one worker's messages would fill it, none of them of use until the others' come, while the way back stands idle.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from echelon.clock import Deadline
from echelon.errors import EchelonError, Late
from echelon.ps.link import Link
from echelon.ps.pending import Pending, Reply, again

WINDOW_BYTES = 3 << 20
"""Under way to one server, and back. Less does not fill the queues of a link; more only lets the fastest worker run further ahead, and at
the end of a step all of it is still to come back, while nothing is left to send."""

VERB = "train.sum"


class Batch:
    """Calls that are waited for as one. Their tensors are the wire's until all are done."""

    def __init__(self, num_calls: int, server: str) -> None:
        self.server = server
        self._left = num_calls
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._error: EchelonError | None = None

    def one_done(self, error: EchelonError | None) -> None:
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if self._left == 0 or self._error is not None:
                self._over.set()

    def wait(self, deadline: Deadline) -> Reply:
        """Blocks until all are answered; raises the first error as soon as there is one, Late at the deadline."""
        if not self._over.wait(min(deadline.left_s, threading.TIMEOUT_MAX)):
            raise Late(
                f"{VERB}: the parameter server at {self.server} did not answer in time",
                remedy="It may be stopped, overloaded, or waiting for another worker.",
            )
        if self._error is not None:
            raise again(self._error)
        return Reply({}, [])


class _Job(NamedTuple):
    link: Link
    head: dict[str, Any]
    piece: Tensor
    batch: Batch


class Window:
    """Pieces become their sums in place, over the connections in turn. Thread-safe; nobody waits in it."""

    def __init__(self, lanes: Sequence[Link], num_bytes: int = WINDOW_BYTES) -> None:
        self._lanes, self._limit = lanes, num_bytes
        self._lock = threading.Lock()
        self._queue: deque[_Job] = deque()
        self._under_way = self._turn = 0
        self._sending = False

    def add(self, calls: Iterable[tuple[dict[str, Any], Tensor]]) -> Batch:
        """Every worker adds the same calls in the same order."""
        calls = list(calls)
        batch = Batch(len(calls), self._lanes[0].server)
        with self._lock:
            for head, piece in calls:
                self._turn += 1
                self._queue.append(_Job(self._lanes[self._turn % len(self._lanes)], head, piece, batch))
        self._send_more()
        return batch

    def _send_more(self) -> None:
        """One thread at a time sends what fits; others leave it to that one."""
        with self._lock:
            if self._sending:
                return
            self._sending = True
        while (job := self._next()) is not None:
            try:
                pending = job.link.call(VERB, job.head, job.piece, out=job.piece)
            except EchelonError as error:
                self._done(job, error)
            else:
                pending.then(partial(self._answered, job, pending))

    def _next(self) -> _Job | None:
        with self._lock:
            if self._queue and (
                not self._under_way or self._under_way + self._queue[0].piece.nbytes <= self._limit
            ):
                job = self._queue.popleft()
                self._under_way += job.piece.nbytes
                return job
            self._sending = False
            return None

    def _answered(self, job: _Job, pending: Pending) -> None:
        try:
            pending.wait(Deadline.after(0))
        except EchelonError as error:
            self._done(job, error)
        else:
            self._done(job, None)
        self._send_more()

    def _done(self, job: _Job, error: EchelonError | None) -> None:
        with self._lock:
            self._under_way -= job.piece.nbytes
        job.batch.one_done(error)
