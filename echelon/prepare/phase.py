"""with run.phase(name): the body runs on rank 0; the others wait for it, however long it takes.

The others wait on heartbeats, not on a timeout: a phase ends when rank 0 says so, fails when rank 0 does.
"""

from __future__ import annotations

import sys
from types import FrameType, TracebackType
from typing import Any

from echelon import activity
from echelon.clock import FOREVER_S, Deadline
from echelon.control.member import Member
from echelon.errors import PhaseFailed
from echelon.events import PhaseChanged, Sink

POLL_S = 30.0


class _Skipped(BaseException):
    """Raised at the first instruction of the body on ranks that only wait; never seen outside of `with`."""


class Phase:
    """What `as` gives: `progress(0.47)` is shown to everybody who waits."""

    def __init__(
        self, name: str, number: int, rank: int, member: Member | None, emit: Sink, over: bool = False
    ) -> None:
        self.name, self.number, self.rank, self.member, self.emit = name, number, rank, member, emit
        self.over = over
        """It was done before the checkpoint from which this run goes on: nobody does it again."""
        self._before: Any = None
        self._inside = activity.inside(f"{activity.PHASE}{name}")

    def progress(self, share: float) -> None:
        activity.moved()
        self.emit(PhaseChanged(rank=self.rank, name=self.name, state="running", share=share))

    def __enter__(self) -> Phase:
        if self.rank == 0 and not self.over:
            self._inside.__enter__()
            self.emit(PhaseChanged(rank=0, name=self.name, state="begun"))
            return self
        if not self.over:
            self._wait()
        self._skip(sys._getframe(1))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self.rank != 0 or self.over:
            self._untrace()
            return kind is _Skipped
        self._inside.__exit__()
        self.emit(PhaseChanged(rank=0, name=self.name, state="over" if kind is None else "failed"))
        if self.member is not None:
            word = b"ok" if kind is None else f"{kind.__name__}: {error}".encode()[:2000]
            self.member.call("store.set", Deadline.after(POLL_S), key=self._key, value=word)
        return False

    @property
    def _key(self) -> str:
        return f"phase/{self.number}"

    def _wait(self) -> None:
        if self.member is None:
            return
        with_wire = self.member.dial()
        try:
            with activity.waiting("phase", self.number, f"{activity.PHASE}{self.name}"):
                word = with_wire.call(
                    "store.get", Deadline.after(FOREVER_S), key=self._key, timeout_s=FOREVER_S
                )
        finally:
            with_wire.close()
        if word != b"ok":
            raise PhaseFailed(f"phase {self.name!r} failed on rank 0: {word.decode(errors='replace')}")

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
