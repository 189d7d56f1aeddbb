"""Request: one operation of a process group, as torch's Work."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.backend.stage import Stage
from echelon.clock import Deadline
from echelon.comm.group import Lost, Met, Work, merge
from echelon.errors import PeerLost

OnLost = Callable[[Lost], None]
"""Told of an operation that was lost, when the program shall go on with zeros."""


ABOUT_S = 0.05
"""A carrier may round a timeout down."""


class OperationLost(PeerLost, dist.DistBackendError):  # type: ignore[misc]
    """An operation of torch.distributed did not meet."""


class Waiter:
    """The thread that completes operations whose future was asked for, in the order in which they began.

    Sends and receives have no order, so each gets a thread of its own.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def take(self, request: Request) -> None:
        if not request.ordered:
            threading.Thread(target=request.complete, name=f"{self.name} {request.what}", daemon=True).start()
            return
        if (
            threading.current_thread() is self._thread
        ):  # a callback of a future asks for the next one and may wait for it
            request.complete()
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
        self._queue.put(request)

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            request.complete()
            del request  # its tensors are the program's again

    def close(self, deadline: Deadline) -> None:
        """Ends after what is queued."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(deadline.left_s)


class Request(dist.Work):  # type: ignore[misc]
    """See torch.distributed.Work. Whoever waits first completes it; others find it complete.

    A lost operation raises OperationLost, or, if the group has somebody to tell, completes with zeros. wait() may be
    called from any thread and again.
    """

    def __init__(
        self,
        what: str,
        works: Sequence[Work],
        stage: Stage,
        deadline: Deadline,
        waiter: Waiter,
        on_lost: OnLost | None,
        ordered: bool = True,
    ) -> None:
        super().__init__()
        self.what, self.works, self.stage, self.deadline = what, works, stage, deadline
        self.waiter, self.on_lost, self.ordered = waiter, on_lost, ordered
        self.error: OperationLost | None = None
        self._lock = threading.Lock()
        self._over = False
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the operation is over. A timeout that passes loses the whole group, not only this."""
        if not self._over:
            deadline = self.deadline
            if timeout is not None and timeout.total_seconds() > 0:
                deadline = deadline.sooner(timeout.total_seconds())
            self._finish(deadline)
        if self.error is not None:
            raise self.error
        return True

    def complete(self) -> None:
        """Waits, and tells the future."""
        self._finish(self.deadline)
        assert self._future is not None
        if self.error is not None:
            self._future.set_exception(self.error)
        else:
            self._future.set_result(self.stage.outputs)

    def _finish(self, deadline: Deadline) -> None:
        with self._lock:
            if self._over:
                return
            outcome = merge([work.wait(deadline) for work in self.works])
            try:
                if isinstance(outcome, Met):
                    self.stage.finish()
                elif self.on_lost is not None:
                    self.stage.zero()
                    self.on_lost(outcome)
                else:
                    self.error = lost_error(self.what, outcome, deadline)
            finally:
                self._over = True

    def get_future(self) -> Any:
        """A future of the output tensors."""
        if self._future is None:
            devices = sorted({x.device for x in self.stage.outputs if x.device.type != "cpu"}, key=str)
            self._future = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
            if self._over:
                self.complete()
            else:
                self.waiter.take(self)
        return self._future

    def get_future_result(self) -> Any:
        return self.get_future()

    def is_completed(self) -> bool:
        """Does not block. Asking has the operation completed in the background."""
        if not self._over:
            self.get_future()
        return self._over

    def is_success(self) -> bool:
        return self._over and self.error is None

    def exception(self) -> OperationLost | None:
        return self.error

    def result(self) -> list[Tensor]:
        self.wait()
        return self.stage.outputs

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """The sender, for a recv that is over."""
        source = getattr(self.works[0], "source", None)
        return -1 if source is None else int(source)

    def _source_rank(self) -> int:
        return self.source_rank()


def lost_error(what: str, lost: Lost, deadline: Deadline) -> OperationLost:
    who = (
        f" without rank{'s' if len(lost.peers) > 1 else ''} {', '.join(map(str, lost.peers))}"
        if lost.peers
        else ""
    )
    when = " before its timeout was over" if deadline.left_s < ABOUT_S else ""
    return OperationLost(
        f"{what} did not meet{who}{when}: {lost.reason or 'no reason is known'}",
        remedy="A process died, or did not call the same operation in time. This process group is of no further use.",
        peers=lost.peers,
    )  # fmt: skip
