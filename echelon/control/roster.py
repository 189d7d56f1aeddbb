"""Who is in the run, as engines may ask it: the boundary between them and the control wire."""

from __future__ import annotations

from typing import Any, Protocol

JOINED, LEFT, FAILED, DEAD = "joined", "left", "failed", "dead"
"""States of a rank: at work; its script came to its end; its script raised; its process ended without a word."""


class Roster(Protocol):
    """What a rank knows of the others. Reading `term` and `stop_requested` costs nothing and never blocks."""

    term: int
    """Grows with every change of membership after the run has formed; as of the last beat (0.5 s old at most)."""

    stop_requested: bool
    """True once somebody asked the run to end at a common step."""

    def roster(self) -> dict[int, dict[str, Any]]:
        """Each rank that ever joined: {"state", "step", "host", "pid"}. Asks the coordinator; blocks up to 10 s."""
