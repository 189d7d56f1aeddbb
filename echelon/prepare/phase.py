"""with run.phase(name): the body runs on one worker, rank 0; the others wait for it, however long it takes.

The others wait on heartbeats, not on a timeout: a phase ends when that worker says so, fails when it does. Where workers go on without
one that was killed, the next one does a phase that it left unfinished, from its beginning.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from echelon import activity
from echelon.clock import FOREVER_S, Deadline
from echelon.control.member import Member
from echelon.errors import PhaseFailed, WorldError
from echelon.events import PhaseChanged, Sink

POLL_S = 30.0
LOOK_S = 0.2
"""How often it is looked whether whoever does the phase is still there."""


class _Skipped(BaseException):
    """Raised at the first instruction of the body on ranks that only wait; never seen outside of `with`."""


class Phase:
    """What `as` gives: `progress(0.47)` is shown to everybody who waits."""

    def __init__(
        self,
        name: str,
        number: int,
        rank: int,
        member: Member | None,
        emit: Sink,
        *,
        does: bool,
        over: bool = False,
        heir: Callable[[], bool] | None = None,
    ) -> None:
        self.name, self.number, self.rank, self.member, self.emit = name, number, rank, member, emit
        self.does, self.heir = does, heir
        """The body runs here; `heir`, where one that is killed is not missed: is it this worker's turn?"""
        self.over = over
        """It was done before the checkpoint from which this run goes on: nobody does it again."""
        self._before: Any = None
        self._inside = activity.inside(f"{activity.PHASE}{name}")

    def progress(self, share: float) -> None:
        activity.moved()
        self.emit(PhaseChanged(rank=self.rank, name=self.name, state="running", share=share))

    def __enter__(self) -> Phase:
        if not self.over and not self.does:
            self._wait()
        if not self.over and self.does:
            self._inside.__enter__()
            self.emit(PhaseChanged(rank=self.rank, name=self.name, state="begun"))
            return self
        self._skip(sys._getframe(1))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not self.does or self.over:
            self._untrace()
            return kind is _Skipped
        self._inside.__exit__()
        self.emit(PhaseChanged(rank=self.rank, name=self.name, state="over" if kind is None else "failed"))
        if self.member is not None:
            who = f"failed on rank {self.rank}"
            word = b"ok" if kind is None else f"{who}: {kind.__name__}: {error}".encode()[:2000]
            self.member.call("store.set", Deadline.after(POLL_S), key=self._key, value=word)
        return False

    @property
    def _key(self) -> str:
        return f"phase/{self.number}"

    def _wait(self) -> None:
        """Until another worker has done it, or until it `does` fall to this one."""
        if self.member is None:
            return
        with activity.waiting("phase", self.number, f"{activity.PHASE}{self.name}"):
            word = (
                self._word(self.member) if self.heir is None else self._word_or_turn(self.member, self.heir)
            )
        if word is None:
            self.does = True
        elif word != b"ok":
            raise PhaseFailed(f"phase {self.name!r} {word.decode(errors='replace')}")

    def _word(self, member: Member) -> bytes:
        wire = member.dial()
        try:
            return bytes(
                wire.call("store.get", Deadline.after(FOREVER_S), key=self._key, timeout_s=FOREVER_S)
            )
        finally:
            wire.close()

    def _word_or_turn(self, member: Member, heir: Callable[[], bool]) -> bytes | None:
        """The same; None when all that were before this worker are gone."""
        pause = threading.Event()
        while True:
            with contextlib.suppress(WorldError):  # while the coordinator is being started again
                if member.call("store.check", Deadline.after(POLL_S), keys=[self._key]):
                    return bytes(
                        member.call("store.get", Deadline.after(POLL_S), key=self._key, timeout_s=0.0)
                    )
                if heir():
                    return None
            pause.wait(LOOK_S)

    def _skip(self, frame: FrameType) -> None:
        """Raises in the caller's frame before the first instruction of the body."""
        self._before = (sys.gettrace(), frame, frame.f_trace, frame.f_trace_opcodes)

        def stop(frame: FrameType, event: str, arg: Any) -> Any:
            raise _Skipped

        sys.settrace(lambda frame, event, arg: None)
        frame.f_trace_opcodes = True
        frame.f_trace = stop

    def _untrace(self) -> None:
        """Whoever traced before us (a debugger, coverage) goes on."""
        if self._before is not None:
            tracer, frame, f_trace, opcodes = self._before
            frame.f_trace_opcodes = opcodes
            frame.f_trace = f_trace
            sys.settrace(tracer)
