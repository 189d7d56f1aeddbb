"""Stopping a run in good order: asked once, it has a time in which to end with a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from echelon.activity import IMPORTING
from echelon.clock import Clock
from echelon.errors import PREEMPTED
from echelon.events import Beat, CheckpointSaved, Configured, Event, Resumed, StopAsked
from echelon.launch.asked import Stop
from echelon.launch.blame import Exit

TERMINATED = 143
INIT_S = 10.0
"""How long a script that has not called echelon.init may take to do so, once the run is asked to stop and no worker is seen
to import any more, or to wait in echelon.init for the others; never longer than the grace."""

LEAVE_S = 10.0
"""How long processes may take to end once their checkpoint is complete."""


class Preempting:
    """One a run. `again` is the command that goes on, `say` shows a sentence to a person."""

    def __init__(
        self, grace_s: float, again: str, say: Callable[[str], None], clock: Clock = time.monotonic
    ) -> None:
        self._grace_s, self._again, self._say, self._clock = grace_s, again, say, clock
        self._since = 0.0
        self._reason = ""
        self._path = ""
        """The last complete checkpoint that was heard of, "" when there is none."""
        self._saved = False
        """It was completed after the request, and is no older than it: all that is left to do is to leave."""
        self._step = 0
        """The last committed step that was heard of before the request."""
        self._starting = 0.0
        """When a worker was last seen on its way to echelon.init."""
        self._joined = False
        """The script has called echelon.init: there may be something to save."""

    @property
    def begun(self) -> bool:
        """Was the run asked to stop?"""
        return bool(self._reason)

    def begin(self, reason: str) -> None:
        """The run is asked to stop, here or anywhere; only the first time counts."""
        if not self.begun:
            self._reason, self._since = reason, self._clock()
            self._say(f"asked to stop ({reason}): a checkpoint at the next step, within {self._grace_s:g} s")

    def hear(self, event: Event) -> None:
        if isinstance(event, StopAsked):
            self.begin(event.reason)
        elif isinstance(event, Configured):
            self._joined = True
        elif isinstance(event, Beat):
            self._step = self._step if self.begun else max(self._step, event.step)
            if event.doing == IMPORTING or event.waits_group == "start":
                self._starting = self._clock()
        elif isinstance(event, CheckpointSaved | Resumed):
            self._path = event.path
            last = isinstance(event, CheckpointSaved) and event.step >= self._step
            self._saved = self.begun and last  # one that was under way when the request came is not the last

    def in_order(self, end: Exit) -> bool:
        """Did this worker end because it was asked to?"""
        return self.begun and end.code == PREEMPTED

    def verdict(self, exits: Mapping[int, Exit], num_workers: int, now: float) -> Stop | None:
        """How the run ends, or None while there is time.

        A worker that came to its own end meanwhile is no failure: then the run was simply over.
        """
        if not self.begun:
            return None
        late_s = now - self._since - self._grace_s
        out = len(exits) == num_workers and any(self.in_order(end) for end in exits.values())
        if out or (self._saved and late_s > LEAVE_S):
            words = (f"checkpoint  {self._path}", f"go on with  {self._again}")
            return Stop(PREEMPTED, f"stopped in good order ({self._reason})", words)
        if not self._joined and now - max(self._since, self._starting) > min(INIT_S, self._grace_s):
            reason = (
                f"ended before the script called echelon.init, so there is nothing to save ({self._reason})"
            )
            return Stop(TERMINATED, reason)
        if not self._saved and late_s > 0:
            last = f"The last complete one: {self._path}" if self._path else "There is none at all."
            advice = "Give it more time with --grace-s, or save more often: --set checkpoint_every=N."
            reason = f"ended, because no checkpoint was complete within {self._grace_s:g} s ({self._reason})"
            return Stop(TERMINATED, reason, (last, advice))
        return None
