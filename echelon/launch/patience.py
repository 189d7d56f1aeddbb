"""How long the supervisor bears with a worker or server that holds up the run: one incident, its block, and when it ends the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from echelon.control.roster import Who
from echelon.events import Configured, Event, Stuck, Unstuck
from echelon.launch.asked import Stop
from echelon.show.stuck import headline, stuck_block, unstuck_line
from echelon.strategy import Strategy

CODE = 124
FIRST_FACTOR = 10.0
"""Before the first committed step everything may take long: compiling, loading."""


class Patience:
    """Feed it every event; it says what to print, and when it is time to stop. `log` names a process's log."""

    def __init__(
        self, fields: Mapping[str, Any], log: Callable[[Who], str], style: Callable[[], bool]
    ) -> None:
        self._log, self._style = log, style
        self._incident: Stuck | None = None
        self._since = self._due = 0.0
        self._waits, self._stuck_s = False, 0.0
        self._configure(fields)

    def hear(self, event: Event, now: float) -> list[str]:
        """The lines that this event deserves."""
        if isinstance(event, Configured):
            self._configure(event.strategy)
        elif isinstance(event, Stuck):
            before = self._incident
            same = before is not None and (before.role, before.rank, before.kind) == (
                event.role,
                event.rank,
                event.kind,
            )
            if not same:
                self._since, self._due = now, now + self._patience_s(event)
            self._incident = event
            return self._block(event, self._then(event))
        elif isinstance(event, Unstuck):
            self._incident = None
            return [unstuck_line(event)]
        return []

    def stop(self, now: float) -> Stop | None:
        """The reason to end the run, once patience is over."""
        event = self._incident
        if event is None or self._waits or not event.stops or now < self._due:
            return None
        then = f"The run was stopped {now - self._since:.0f} s after the alarm (exit code {CODE})."
        return Stop(CODE, headline(event), block=tuple(self._block(event, then)))

    def _configure(self, fields: Mapping[str, Any]) -> None:
        default = Strategy()
        self._waits = fields.get("stuck", default.stuck) == "wait"
        self._stuck_s = float(fields.get("stuck_s", default.stuck_s))

    def _patience_s(self, event: Stuck) -> float:
        return self._stuck_s * (1.0 if event.step or event.sure else FIRST_FACTOR)

    def _then(self, event: Stuck) -> str:
        if not event.stops:
            return "Nobody waits for it: this is only a notice."
        if self._waits:
            return "The run waits (stuck=wait)."
        return (
            f"Unless it moves, the run stops in {self._patience_s(event):g} s with exit code {CODE}. "
            "--set stuck=wait waits instead, --set stuck_s=N stops later."
        )

    def _block(self, event: Stuck, then: str) -> list[str]:
        log = self._log(Who(event.role, event.rank)) if event.rank is not None else ""
        return stuck_block(event, log=log, then=then, style=self._style(), cwd=os.getcwd())
