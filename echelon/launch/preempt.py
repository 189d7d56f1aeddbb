"""Stopping a run in good order: asked once, it has a time in which to end with a checkpoint. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echelon.errors import PREEMPTED
from echelon.launch.asked import Stop
from echelon.launch.blame import Exit

TERMINATED = 143
LEAVE_S = 10.0
"""How long processes may take to end once their checkpoint is complete."""


@dataclass
class Preemption:
    """A request to stop: since when, for how long at most, and why."""

    since: float
    grace_s: float
    reason: str
    path: str = ""
    """The last complete checkpoint that was heard of, "" when there is none."""

    saved: bool = False
    """It was completed after the request: all that is left to do is to leave."""

    def is_order(self, end: Exit) -> bool:
        """Did this worker end because it was asked to?"""
        return end.code == PREEMPTED

    def verdict(self, exits: Mapping[int, Exit], num_workers: int, now: float, again: str) -> Stop | None:
        """How the run ends, or None while there is time; `again` is the command that goes on.

        A worker that came to its own end meanwhile is no failure: then the run was simply over.
        """
        late_s = now - self.since - self.grace_s
        out = len(exits) == num_workers and any(self.is_order(end) for end in exits.values())
        if out or (self.saved and late_s > LEAVE_S):
            words = (f"checkpoint  {self.path}", f"go on with  {again}")
            return Stop(PREEMPTED, f"stopped in good order ({self.reason})", words)
        if not self.saved and late_s > 0:
            last = f"The last complete one: {self.path}" if self.path else "There is none at all."
            advice = "Give it more time with --grace-s, or save more often: --set checkpoint_every=N."
            reason = f"ended, because no checkpoint was complete within {self.grace_s:g} s ({self.reason})"
            return Stop(TERMINATED, reason, (last, advice))
        return None
