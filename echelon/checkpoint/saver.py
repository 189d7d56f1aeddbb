"""Writing checkpoints beside training: begin one and go on."""

from __future__ import annotations

import atexit
import collections
import contextlib
import json
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon import activity
from echelon.checkpoint import objects as trees
from echelon.checkpoint import prune
from echelon.checkpoint.agree import Agreement, Verdict
from echelon.checkpoint.attempt import Attempt
from echelon.checkpoint.holding import Holding
from echelon.checkpoint.meeting import Meeting
from echelon.checkpoint.plan import Plan
from echelon.checkpoint.snapshot import HostBuffer, Snapshot
from echelon.checkpoint.store import Store, open_store
from echelon.clock import FOREVER_S, Deadline
from echelon.errors import CheckpointError, EchelonError
from echelon.events import CheckpointFailed, CheckpointSaved, Event, Sink, Warned

AT_ONCE_BYTES = 32 << 20
"""A share smaller than this is copied in save(): a thread would cost more than the copy."""

COPY_S = 600.0
LAST_S = 3600.0
"""How long a save waits for the one before."""

EXIT_S = 10.0
"""How long an interpreter that ends waits for what nobody waited for: a thread cut off in C++ aborts the process."""


class Checkpoint:
    """A checkpoint under way or over. Reading its fields never blocks."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path
        self.state = "copying"
        """copying | writing | complete | failed"""
        self.error = ""
        """Why it failed; the same on every rank."""
        self._over = threading.Event()

    def wait(self, deadline: Deadline | None = None) -> Checkpoint:
        """Blocks until it is complete; CheckpointError when it failed, or is not over at the deadline."""
        limit_s = min((deadline or Deadline.after(FOREVER_S)).left_s, threading.TIMEOUT_MAX)
        with activity.inside("checkpoint"):
            over = self._over.wait(limit_s)
        if not over:
            raise CheckpointError(
                f"the checkpoint of step {self.step} is still {self.state} at the deadline: {self.path}"
            )
        if self.state == "failed":
            raise CheckpointError(f"the checkpoint of step {self.step} failed: {self.error}", step=self.step)
        return self

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def __repr__(self) -> str:
        return f"Checkpoint(step={self.step}, state={self.state!r}, path={self.path!r})"

    def _end(self, verdict: Verdict) -> None:
        self.error = verdict.reason
        self.state = "complete" if verdict.complete else "failed"
        self._over.set()


class Saver:
    """Writes checkpoints of one run from one rank. One is under way at a time.

    Every rank calls the same things in the same order, all from one thread. `emit` is called in that thread too: what
    the background has to say is handed over in the next save(), before_change() or finish(). A checkpoint that fails
    never raises here: its handle and an event say so, and training goes on with the older ones kept.
    """

    def __init__(
        self, target: str | Path, rank: int, size: int, meeting: Meeting, emit: Sink, *, keep: int = 2
    ) -> None:
        """Opens nothing yet but the store; raises CheckpointError for a target that cannot be one."""
        self.store: Store = open_store(target)
        self.rank, self.size, self.keep = rank, size, keep
        self.stall_s = 0.0
        """Seconds that callers were blocked in save() and before_change()."""
        self.last: Checkpoint | None = None
        self._meeting, self._emit = meeting, emit
        self._buffer = HostBuffer()
        self._plan: Plan | None = None
        self._attempt: Attempt | None = None
        self._thread: threading.Thread | None = None
        self._told: collections.deque[Event] = collections.deque()
        self._number = 0
        _alive.add(self)
        self._past: list[Agreement] = []
        self._warned = False

    def reserve(self, holdings: Sequence[Holding]) -> None:
        """May be called once before training: gets the memory of a checkpoint of these in the background, so that the
        first one stalls no longer than the next. Returns at once."""
        plan = self._planned(holdings)
        if plan.num_bytes >= AT_ONCE_BYTES and self._thread is None:
            pinned = any(holding.tensor.device.type == "cuda" for holding in holdings)
            self._buffer.take(plan.num_bytes, pinned=pinned)
            self._thread = threading.Thread(
                target=self._buffer.populate, name="echelon-checkpoint", daemon=True
            )
            self._thread.start()

    def save(
        self,
        step: int,
        holdings: Sequence[Holding],
        objects: Any,
        about: Mapping[str, Any],
        since: float | None = None,
    ) -> Checkpoint:
        """Begins a checkpoint and returns: copied beside what the caller does next, then written, then agreed.

        Waits first for one that is still under way. Tensors that are `settled` must not change before before_change()
        was called; all others, and `objects`, are copied here. Raises CheckpointError for what no checkpoint can hold.
        `since` is when the caller began to gather all this (time.monotonic()): that is part of what training waited.
        """
        began = time.monotonic() if since is None else since
        try:
            self._wait_for_last()
            topic, self._number = f"{self._number:06d}-{step}", self._number + 1
            agreement = Agreement(self._meeting, topic, self.rank)
            try:
                attempt, has_rest = self._begin(step, holdings, objects, about, agreement, began)
            except BaseException as error:  # the others must not wait for us
                agreement.call_off(f"rank {self.rank} could not begin: {error}")
                self._past.append(agreement)
                raise
            checkpoint = Checkpoint(step, f"{self.store.url}/{attempt.folder}")
            self.last, self._attempt = checkpoint, attempt
            attempt.stall_s += time.monotonic() - began
            self._thread = threading.Thread(
                target=self._run, args=(attempt, checkpoint, has_rest), name="echelon-checkpoint", daemon=True
            )
            self._thread.start()
            return checkpoint
        finally:
            self.stall_s += time.monotonic() - began
            self._hand_over()

    def _begin(
        self, step: int, holdings: Sequence[Holding], objects: Any, about: Mapping[str, Any], agreement: Agreement, began: float
    ) -> tuple[Attempt, bool]:  # fmt: skip
        """Checks what was given and copies what may change soon; whether there is a rest to copy."""
        plan = self._planned(holdings)
        encoded = trees.encode(objects)
        _check_about(about)
        snapshot = Snapshot(plan, holdings, self._buffer)
        attempt = Attempt(self.store, agreement, snapshot, encoded, step=step, rank=self.rank, about=dict(about), keep=self.keep)  # fmt: skip
        has_rest = snapshot.copy_now(everything=snapshot.num_bytes < AT_ONCE_BYTES)
        attempt.copy_s = time.monotonic() - began
        if not has_rest:
            attempt.copied.set()
        return attempt, has_rest

    def _planned(self, holdings: Sequence[Holding]) -> Plan:
        if self._plan is None or not self._plan.fits(holdings):
            self._plan = Plan(holdings, self.rank)
        return self._plan

    def before_change(self) -> None:
        """Called before any settled tensor changes: returns when the copy no longer needs it. Cheap when idle; where
        the tensors lie on a GPU its stream waits, not the caller."""
        attempt = self._attempt
        if attempt is not None:
            began = time.monotonic()
            if not attempt.copied.wait(COPY_S):
                raise CheckpointError(f"copying the state of step {attempt.step} took more than {COPY_S:g} s")
            attempt.snapshot.hold_stream()
            spent = time.monotonic() - began
            self.stall_s += spent
            attempt.stall_s += spent
            self._attempt = None
        if self._told:
            self._hand_over()

    def finish(self, deadline: Deadline) -> None:
        """Waits for what is under way. CheckpointError if that is not over at the deadline; one that failed has said so."""
        if self._thread is not None:
            self._thread.join(min(deadline.left_s, threading.TIMEOUT_MAX))
        self._hand_over()
        if self.last is not None and not self.last.over:
            raise CheckpointError(
                f"the checkpoint of step {self.last.step} is still {self.last.state}: {self.last.path}",
                remedy="The medium is slow: give it more time (--grace-s), or write to a faster one.",
            )

    def close(self) -> None:
        """Lets go of buffer and wires; nothing may be under way."""
        self._meeting.close()
        self._buffer.close()

    def _wait_for_last(self) -> None:
        if self._thread is None:
            return
        if self._thread.is_alive():
            if not self._warned and self.rank == 0 and self.last is not None and not self.last.over:
                self._warned = True
                self._emit(Warned(rank=0, message=f"the checkpoint of step {self.last.step} took longer than the steps between, "
                                  "and the next one waits for it\n  Checkpoint less often, or write to a faster medium."))  # fmt: skip
            self._thread.join(LAST_S)
            if self._thread.is_alive():
                raise CheckpointError(
                    f"the checkpoint before this one is not over after {LAST_S:g} s more",
                    remedy="Its medium hangs: `echelon status` shows where the thread echelon-checkpoint is.",
                )
        self._thread = None

    def _run(self, attempt: Attempt, checkpoint: Checkpoint, has_rest: bool) -> None:
        """The background thread."""

        def changed(state: str) -> None:
            checkpoint.state = state

        verdict = Verdict(False, "a fault of ours in the background thread")
        try:
            verdict = attempt.run(has_rest, changed)
            if self.rank == 0:
                self._tell(attempt, checkpoint, verdict)
                self._forget(attempt.agreement)
        finally:
            checkpoint._end(verdict)

    def _forget(self, agreement: Agreement) -> None:
        """Clears what was said about earlier checkpoints, once all ranks are seen to be done with them."""
        if agreement.heard:
            past, self._past = self._past, []
            for earlier in past:
                with contextlib.suppress(EchelonError):
                    earlier.forget()
        self._past.append(agreement)

    def _tell(self, attempt: Attempt, checkpoint: Checkpoint, verdict: Verdict) -> None:
        event: Event
        if verdict.complete:
            event = CheckpointSaved(rank=0, step=attempt.step, path=checkpoint.path, num_bytes=attempt.num_bytes,
                                    copy_s=attempt.copy_s, write_s=attempt.write_s, stall_s=attempt.stall_s)  # fmt: skip
        else:
            kept = None
            with contextlib.suppress(EchelonError):
                kept = prune.newest(self.store)
            event = CheckpointFailed(rank=0, step=attempt.step, path=checkpoint.path, reason=verdict.reason,
                                     kept=f"{self.store.url}/{kept}" if kept else "")  # fmt: skip
        self._told.append(event)
        if attempt.trouble:
            self._told.append(Warned(rank=0, message=attempt.trouble))

    def _hand_over(self) -> None:
        while self._told:
            self._emit(self._told.popleft())


_alive: weakref.WeakSet[Saver] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    deadline = Deadline.after(EXIT_S)
    for saver in list(_alive):
        if saver._thread is not None:
            saver._thread.join(deadline.left_s)


def _check_about(about: Mapping[str, Any]) -> None:
    try:
        json.dumps(about, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"what a checkpoint says about itself must be JSON: {error}") from None
