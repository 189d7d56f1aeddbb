"""What goes over one connection: no thread that has something to send waits for the socket."""

from __future__ import annotations

import array
import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from echelon.ps.frame import Limits
from echelon.ps.inbox import Stalled

SMALL_BYTES = 64 * 1024
"""A frame up to this is sent by whoever has it, if the socket takes it at once; others by the connection's own thread."""

MAX_PARTS = 512
Part = bytes | memoryview


class Outbox:
    """What goes, in the order in which it was given. Thread-safe; send() never waits for the socket.

    A small frame goes at once if the socket takes it; everything else goes through a thread that starts with the first such
    frame. `broken(error)` is told once, from any thread, when the socket fails or does not move for limits.stall_s.
    """

    def __init__(
        self, wire: socket.socket, limits: Limits, name: str, broken: Callable[[Exception], None]
    ) -> None:
        self._wire, self._limits, self._name, self._broken = wire, limits, name, broken
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._queue: deque[_Item] = deque()
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self.num_bytes = 0

    def send(
        self,
        parts: Sequence[Part],
        num_bytes: int,
        sent: Callable[[], None] | None = None,
        *,
        fds: Sequence[int] = (),
        keep: object = None,
        wait: bool = False,
    ) -> None:
        """`parts` stay as they are until `sent()` is called, once, when they are gone or the connection is over; `keep` is held
        until then. `wait`: a small frame may go together with what follows, at the next flush()."""
        item = _Item(list(parts), num_bytes, sent, fds, keep)
        with self._lock:
            if self._closed:
                finished, failed = [item], None
            else:
                self.num_bytes += num_bytes
                self._queue.append(item)
                if self._busy or (wait and num_bytes <= SMALL_BYTES):
                    return
                finished, failed = self._try_now()
        self._settle(finished, failed)

    def flush(self) -> None:
        """Sends what send(wait=True) held back."""
        if not self._queue or self._busy:
            return
        with self._lock:
            if self._busy or self._closed:
                return
            finished, failed = self._try_now()
        self._settle(finished, failed)

    def drain(self, timeout_s: float) -> bool:
        """Waits until everything was sent; False if that did not happen in time."""
        with self._lock:
            return self._wake.wait_for(lambda: self._closed or not (self._queue or self._busy), timeout_s)

    def close(self) -> None:
        """What was not sent is dropped. Does not close the socket; does not wait."""
        with self._lock:
            self._closed = True
            dropped, self._queue = list(self._queue), deque()
            self._wake.notify_all()
        for item in dropped:
            item.finish()

    def join(self, timeout_s: float) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._closed, self._queue = True, deque()

    def _settle(self, finished: list[_Item], failed: OSError | None) -> None:
        for item in finished:
            item.finish()
        if failed is not None:
            self._fail(failed)

    def _try_now(self) -> tuple[list[_Item], OSError | None]:
        """Sends small frames from the head of the queue as far as the socket takes them, and hands the rest over. Holds the lock."""
        finished: list[_Item] = []
        try:
            while batch := self._small_ones():
                self._push(batch, socket.MSG_DONTWAIT)
                while self._queue and not self._queue[0].left:
                    finished.append(self._queue.popleft())
                if batch[-1].left:
                    break
        except BlockingIOError:
            pass
        except OSError as error:
            return finished, error
        if self._queue:
            self._hand_over()
        return finished, None

    def _small_ones(self) -> list[_Item]:
        batch: list[_Item] = []
        size = 0
        for item in self._queue:
            if size + item.left > SMALL_BYTES or len(batch) == 64 or (item.fds and batch):
                break
            batch.append(item)
            size += item.left
        return batch

    def _push(self, batch: list[_Item], flags: int = 0) -> None:
        """One write of these frames, as far as the socket takes them; descriptors go with the first byte."""
        parts = [part for item in batch for part in item.parts][:MAX_PARTS]
        extra: list[Any] = []
        if batch[0].fds:
            extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", batch[0].fds))]
        count = self._wire.sendmsg(parts, extra, flags | socket.MSG_NOSIGNAL)
        for item in batch:
            count = item.advance(count)

    def _hand_over(self) -> None:
        """From here on, the thread sends. Holds the lock."""
        self._busy = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._wake.notify_all()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._busy = False
                    self._wake.notify_all()
                self._wake.wait_for(lambda: self._closed or (self._busy and self._queue))
                if self._closed:
                    return
                item = self._queue[0]
            try:
                self._send_whole(item)
            except OSError as error:
                self._fail(error)
                return
            with self._lock:
                if self._queue and self._queue[0] is item:
                    self._queue.popleft()
            item.finish()

    def _send_whole(self, item: _Item) -> None:
        since = time.monotonic()
        while item.left:
            try:
                self._push([item])
            except BlockingIOError:
                if self._closed:
                    raise ConnectionError("closed") from None
                if time.monotonic() - since > self._limits.stall_s:
                    raise Stalled(f"it took nothing for {self._limits.stall_s:g} s") from None
                continue
            since = time.monotonic()

    def _fail(self, error: Exception) -> None:
        self.close()
        self._broken(error)


class _Item:
    """One frame on its way."""

    def __init__(
        self,
        parts: list[Part],
        num_bytes: int,
        sent: Callable[[], None] | None,
        fds: Sequence[int],
        keep: object,
    ) -> None:
        self.parts, self.left, self._sent, self.fds, self.keep = parts, num_bytes, sent, fds, keep

    def advance(self, count: int) -> int:
        """`count` bytes were sent of this frame and of those behind it; gives what is left for them."""
        if count:
            self.fds = ()
        mine = min(count, self.left)
        self.left -= mine
        rest = mine
        while rest and rest >= len(self.parts[0]):
            rest -= len(self.parts.pop(0))
        if rest:
            self.parts[0] = memoryview(self.parts[0])[rest:]
        return count - mine

    def finish(self) -> None:
        sent, self._sent = self._sent, None
        if sent is not None:
            with contextlib.suppress(Exception):
                sent()
