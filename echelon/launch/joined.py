"""A further host's supervisor: the same as the first's, but somebody else's coordinator, and somebody else decides the end.

It starts its share of the workers and servers under a guard of its own, tells how they fare, and ends them when the run is over:
because the first host says so, because the first host is gone, or because somebody asked this one.
"""

from __future__ import annotations

import time
from typing import Any

from echelon.clock import Deadline
from echelon.control import token as tokens
from echelon.control.roster import Who
from echelon.events import Event, Failed, HostAsked, HostLeft, ProcessStarted, RunEnded, StopAsked
from echelon.launch import lastwords
from echelon.launch.asked import Stop
from echelon.launch.blame import Exit
from echelon.launch.forward import Forward
from echelon.launch.lifeline import Lifeline
from echelon.launch.local import Plan
from echelon.launch.rundir import RunDir
from echelon.launch.streams import Screen, tail
from echelon.launch.supervisor import GRACE_S, Supervisor
from echelon.show.lines import fold
from echelon.show.progress import Display

ASK_S = 3.0
"""How long the first host may take to end the run after this one asked for it."""

GOODBYE_S = 1.5


class JoinedSupervisor(Supervisor):
    """See Supervisor. `first` is the first host as people know it, for messages."""

    def __init__(self, plan: Plan, folder: RunDir, display: Display, token: str, first: str) -> None:
        self._token, self._first = token, first
        super().__init__(plan, folder, None, display)
        self.over: RunEnded | None = None
        self.asked_since: float | None = None

    def _screen(self) -> Screen:
        return Forward(self.display, lambda event: self.link.emit(event), self.plan.host, self.plan.index)

    def _start_roles(self) -> None:
        tokens.write(self.plan.token_file, self._token)
        self._start_link(self._token)
        for (role, rank), process in self.folder.processes.items():
            self.link.emit(ProcessStarted(rank=rank, role=role, host=self.plan.host, pid=process.pid))
        self.lifeline = Lifeline(self.plan.coordinator, lambda: self.link.silent_s, self.waker.wake)
        self._start_workers()

    def _on_event(self, event: Event) -> None:
        """Of all that the run tells, only its failure and its end matter here: the first host shows the rest."""
        self.ends.hear(event)
        if isinstance(event, Failed):
            self.streams.failing()
        elif isinstance(event, StopAsked):
            self.preempting.hear(event)
        elif isinstance(event, RunEnded) and self.over is None:
            self.over = event

    def _last_words(self, who: Who, end: Exit) -> dict[str, Any]:
        """The first host cannot look here: why, and the end of the log, travel along."""
        if not end.failed or end.ours:
            return {}
        log, why = self.folder.log(*who), lastwords.why(end, self.cgroups.get(who, ""), self.memory)
        return {"cause": why, "log": str(log), "log_tail": tail(log)}

    def _settle(self, now: float) -> None:
        """Ends when the first host says so, or is gone."""
        if self.over is not None:
            self._end()
        elif self.lifeline.reason:
            self.stop = Stop(137, f"the first host ({self._first}) is gone: {self.lifeline.reason}")

    def _end(self) -> None:
        """A wish of our own is told first, so that all hosts end alike; then the tree here ends."""
        if self.stop is not None and self.over is None and not self.lifeline.reason:
            now = time.monotonic()
            asked_since = self._ask()
            if now - asked_since < ASK_S and self.asked.times < 2:
                return
        self.ending_since = self.ending_since or time.monotonic()
        if self._rest_gone():
            self._end_tree()  # otherwise _decide waits for the servers here, which were sent home

    def _rest_gone(self) -> bool:
        return self.ends.servers_left(self.code(), self.plan.servers)

    def _ask(self) -> float:
        """Asks the first host, once, to end the run; gives when that was."""
        if self.asked_since is None and self.stop is not None:
            self.asked_since = time.monotonic()
            self.link.emit(HostAsked(host=self.plan.host, code=self.stop.code, reason=self.stop.reason))
        return self.asked_since or 0.0

    def _end_tree(self) -> None:
        self.seeing.close()
        self.tree_ending_since = time.monotonic()
        self.tether.end(GRACE_S)

    def _finish(self) -> int:
        """Everything here is gone: says so to the first host, and how it went to the person here."""
        self.streams.finish([failed.traceback for failed in self.ends.failures])
        self.lifeline.close()
        if self.stop is not None and self.over is None and self.asked_since is None:
            self._ask()  # such as after the death of the guard here: nothing is left to wait for
        if not self.lifeline.reason:
            self.link.emit(HostLeft(host=self.plan.host, index=self.plan.index))
        self.link.close(Deadline.after(GOODBYE_S if not self.lifeline.reason else 0.0))
        code = self.code()
        if self.stop is not None and (self.over is None or self.over.code == self.stop.code):
            self.display.say("", *fold(f"run {self.plan.name}: {self.stop.reason}"))
        elif code == 0:
            self.display.say(f"run {self.plan.name} finished")
        else:
            assert self.over is not None
            self.display.say("", f"run {self.plan.name} ended with exit code {code}", *self._blame())
        return code

    def code(self) -> int:
        if self.over is not None:
            return self.over.code
        return self.stop.code if self.stop is not None else 137

    def _blame(self) -> list[str]:
        """A sentence on why, and where the whole of it is told."""
        assert self.over is not None
        verdict = self.verdict()
        if self.over.reason:
            return fold(f"  {self.over.reason}")
        who = [f"  {verdict.who}: {verdict.reason}"] if verdict is not None else []
        return [*who, f"  the first host ({self._first}) shows the whole of it"]
