"""Keeps what stuck.py decides on: every worker's and server's last beat and since when it stands still; one incident at a time.

Lives in the coordinator's event loop, which calls look() once a second. Times are the coordinator's own: when beats came.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from echelon import activity
from echelon.activity import DATA, Wait
from echelon.clock import Clock
from echelon.control.roster import LEFT, SERVER, WORKER, Who
from echelon.elastic import stuck
from echelon.elastic.membership import Change
from echelon.elastic.views import (
    ABSENT,
    DEFAULT,
    LINK,
    MISMATCH,
    SILENT,
    STOPPED,
    UNREACHABLE,
    Options,
    Verdict,
    View,
    limit_s,
)
from echelon.events import Beat, Event, Serving, Sign, Stuck, Unstuck

NUM_STEPS = 64
"""Step times a rank's median is taken of."""

GAP_S = 3.0
"""When we ourselves did not look for so long, nobody else is to blame for it."""

AHEAD_S = 4.0
"""A stack is asked for this long before it will be shown."""

STACK_S = 5.0
"""A stack that was asked for is shown if it is not older than this."""

SPELLED = f"{SERVER}-"
MAX_FRAMES = 40
MAX_CHARS = 1000


@dataclass
class Seen:
    """What a host's supervisor last said of a process, with the CPU it had used when the rank last beat."""

    state: str
    cpu_s: float
    at: float
    cpu_before_s: float
    before_at: float


@dataclass
class Rank:
    """One worker or server as it came through its beats."""

    beat: Sign
    at: float
    moved_at: float
    cpu_then_s: float
    """Its CPU seconds when it last moved."""
    step_at: tuple[int, float] = (0, 0.0)
    steps_s: collections.deque[float] = field(default_factory=lambda: collections.deque(maxlen=NUM_STEPS))


class Lookout:
    """See the module. All input came over a wire and is checked."""

    def __init__(self, options: Options = DEFAULT, clock: Clock = time.monotonic) -> None:
        self.options, self._clock = options, clock
        self.ranks: dict[Who, Rank] = {}
        self.processes: dict[Who, Seen] = {}
        self.stacks: dict[Who, tuple[list[str], float]] = {}
        self.incident: Verdict | None = None
        self._since = 0.0
        self._then: dict[Who, tuple[Any, ...]] = {}
        self._looked_at = clock()

    def joined(self, who: Who) -> None:
        """A new process takes this seat: nothing that is known holds any more."""
        self.ranks.pop(who, None)
        self.processes.pop(who, None)
        self.stacks.pop(who, None)

    def beat(self, beat: Sign) -> None:
        """Takes a worker's or server's beat in."""
        who = Who(SERVER if isinstance(beat, Serving) else WORKER, -1 if beat.rank is None else beat.rank)
        now, known = self._clock(), self.ranks.get(who)
        if known is None:
            self.ranks[who] = Rank(beat, now, now, beat.cpu_s, (beat.step, _total_s(beat)))
            return
        if not beat.stack:  # a last word of its run, not of the beat thread: only its counters are new
            beat = _with_place(beat, known.beat)
        if _place(known.beat) != _place(beat):
            known.moved_at, known.cpu_then_s = now, beat.cpu_s
        step, total_s = known.step_at
        if isinstance(beat, Beat) and beat.step > step:
            if step:
                each = max(0.0, beat.total_s - total_s) / (beat.step - step)
                known.steps_s.extend([each] * min(beat.step - step, 4))
            known.step_at = (beat.step, beat.total_s)
        known.beat, known.at = beat, now
        process = self.processes.get(who)
        if process is not None:
            process.cpu_before_s, process.before_at = process.cpu_s, now

    def seen(self, ranks: Mapping[str, Any], stacks: Mapping[str, Any]) -> None:
        """A host's supervisor looked at its processes: {Who.key: [state, CPU seconds]}; and stacks that were asked for."""
        now = self._clock()
        for text, told in ranks.items():
            who = self._known(text)
            if who is None or not isinstance(told, list) or len(told) != 2 or not _is_seconds(told[1]):
                continue
            state, cpu_s, known = str(told[0])[:1], float(told[1]), self.processes.get(who)
            if known is None:
                self.processes[who] = Seen(state, cpu_s, now, cpu_s, now)
            else:
                known.state, known.cpu_s, known.at = state, cpu_s, now
        for text, frames in stacks.items():
            who = self._known(text)
            if who is not None and isinstance(frames, list) and frames:
                self.stacks[who] = ([str(frame)[:MAX_CHARS] for frame in frames[-MAX_FRAMES:]], now)

    def _known(self, text: str) -> Who | None:
        """Whom `text` spells, if it ever beat; so nobody can fill the tables with ranks that are not."""
        role, digits = (SERVER, text[len(SPELLED) :]) if text.startswith(SPELLED) else (WORKER, text)
        rank = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 7 else -1
        return Who(role, rank) if Who(role, rank) in self.ranks else None

    def wanted(self) -> dict[str, str]:
        """{Who.key: "process" or "loaders"}: whose stack should be asked for now.

        The process of one that is about to count as silent; the loader processes of one that is about to count as without
        data, since its own stack comes with its beats.
        """
        now = self._clock()
        after_s = limit_s(self.median_step_s(), self.options) - AHEAD_S
        return {
            who.key: "process" if now - rank.at > after_s else "loaders"
            for who, rank in self.ranks.items()
            if (now - rank.at > after_s or (rank.beat.doing == DATA and now - rank.moved_at > after_s))
            and now - self.stacks.get(who, ([], -STACK_S))[1] >= STACK_S
            and self.processes.get(who) is not None
            and self.processes[who].state not in ("T", "t", "Z")
        }

    def look(
        self,
        workers: Mapping[int, Change],
        num_workers: int,
        servers: Mapping[int, Change] | None = None,
        num_servers: int = 0,
    ) -> list[Event]:
        """Decides; gives the events of a new incident or of one that is over."""
        seats = {Who(WORKER, rank): seat for rank, seat in workers.items()}
        seats |= {Who(SERVER, rank): seat for rank, seat in (servers or {}).items()}
        now = self._clock()
        if now - self._looked_at > GAP_S:
            self._forgive(now - self._looked_at)
        self._looked_at = now
        if self.incident is not None:
            return self._over(seats, now)
        views = self.views(seats, now)
        if len(views) < num_workers + num_servers:
            return []  # somebody has not even joined: the supervisor watches over that
        verdict = stuck.decide(views, self.median_step_s(), self.options)
        if verdict is None:
            return []
        self.incident, self._since = verdict, now
        self._then = {view.who: self._mark(view.who) for view in views}
        return [self._event(verdict, {view.who: view for view in views}, now)]

    def median_step_s(self) -> float:
        """The median over ranks of each one's median; 0 until steps were seen."""
        each = [statistics.median(rank.steps_s) for rank in self.ranks.values() if rank.steps_s]
        return statistics.median(each) if each else 0.0

    def views(self, seats: Mapping[Who, Change], now: float) -> list[View]:
        """Of all who have a seat and were heard of, the workers first."""
        ordered = sorted(seats.items(), key=lambda item: (item[0].role == SERVER, item[0].rank))
        return [
            self._view(who, seat, rank, now)
            for who, seat in ordered
            if (rank := self.ranks.get(who)) is not None
        ]

    def _view(self, who: Who, seat: Change, rank: Rank, now: float) -> View:
        beat, process = rank.beat, self.processes.get(who)
        silent_s = now - rank.at
        share: float | None = None
        if silent_s >= 2.0 and process is not None:
            spent_s = process.at - process.before_at
            share = (process.cpu_s - process.cpu_before_s) / spent_s if spent_s > 1.0 else None
        elif rank.at > rank.moved_at:
            share = (beat.cpu_s - rank.cpu_then_s) / (rank.at - rank.moved_at)
        wait = Wait(
            beat.waits_group, beat.waits_number, beat.waits_in, beat.waits_bytes, beat.waits_s + silent_s
        )
        return View(
            rank=who.rank, role=who.role, host=seat.host, pid=seat.pid, state=seat.state, step=max(beat.step, seat.step),
            beat_age_s=silent_s, still_s=now - rank.moved_at, doing=self._doing(who, rank), site=beat.site,
            wait=wait if beat.waits_in else None, begun=beat.begun, links=beat.links, cpu_share=share,
            process=process.state if process is not None else "",
            process_age_s=None if process is None else now - process.at,
        )  # fmt: skip

    def _doing(self, who: Who, rank: Rank) -> str:
        """What it last said, unless its stack was asked for since: then what that shows."""
        frames, at = self.stacks.get(who, ([], 0.0))
        if at <= rank.at or rank.beat.doing.startswith(activity.PHASE):
            return rank.beat.doing
        files = [frame.rpartition(":")[0] for frame in reversed(frames)]
        saving = rank.beat.doing if any("/echelon/prepare/save.py" in file for file in files) else ""
        return saving or activity.recognised(files)

    def _event(self, verdict: Verdict, views: Mapping[Who, View], now: float) -> Stuck:
        first = verdict.culprits[0] if verdict.ranks and verdict.kind not in (MISMATCH, LINK) else None
        if first is None:
            step = max((view.step for view in views.values()), default=0)
            return Stuck(
                kind=verdict.kind, reason=verdict.reason, ranks=list(verdict.ranks), step=step,
                age_s=max((v.still_s for v in views.values()), default=0.0), others=list(verdict.others),
                stops=verdict.stops, sure=verdict.sure,
            )  # fmt: skip
        view, rank = views[first], self.ranks[first]
        # a rank that cannot speak was part of every step that the others committed meanwhile
        step = max(view.step, *(v.step for v in views.values())) if view.beat_age_s > 1.0 else view.step
        stack, stack_age_s = rank.beat.stack, now - rank.at
        asked, asked_at = self.stacks.get(first, ([], 0.0))
        if asked and now - asked_at <= STACK_S + 2.0:
            stack, stack_age_s = asked, now - asked_at
        return Stuck(
            rank=first.rank, role=first.role, kind=verdict.kind, reason=verdict.reason, ranks=list(verdict.ranks), host=view.host,
            pid=view.pid, step=step, age_s=view.still_s, stack=list(stack), stack_age_s=stack_age_s,
            others=list(verdict.others), stops=verdict.stops, sure=verdict.sure,
        )  # fmt: skip

    def _over(self, seats: Mapping[Who, Change], now: float) -> list[Event]:
        """An incident is over when somebody who held up the run (or, if nobody did, anybody) moved or left in order.
        A server that was silent moves when it is asked to, so its beat is enough."""
        assert self.incident is not None
        involved = self.incident.culprits if self.incident.kind != ABSENT else ()
        for who in involved or tuple(self._then):
            seat, known = seats.get(who), self.ranks.get(who)
            left = who in involved and seat is not None and seat.state == LEFT
            back = (
                who in involved
                and who.role == SERVER
                and self.incident.kind in (STOPPED, SILENT, UNREACHABLE)
                and known is not None
                and known.at > self._since
            )
            if left or back or self._mark(who) != self._then.get(who):
                kind, self.incident = self.incident.kind, None
                return [Unstuck(rank=who.rank, role=who.role, kind=kind, after_s=now - self._since)]
        return []

    def _mark(self, who: Who) -> tuple[Any, ...]:
        known = self.ranks.get(who)
        return () if known is None else _place(known.beat)

    def _forgive(self, gap_s: float) -> None:
        """We did not run: everybody's clock stood."""
        for rank in self.ranks.values():
            rank.at, rank.moved_at = rank.at + gap_s, rank.moved_at + gap_s
        for process in self.processes.values():
            process.at, process.before_at = process.at + gap_s, process.before_at + gap_s


def _is_seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 <= value < math.inf


def _place(beat: Sign) -> tuple[int, int, int]:
    return beat.progress, beat.step, beat.samples if isinstance(beat, Beat) else 0


def _total_s(beat: Sign) -> float:
    return beat.total_s if isinstance(beat, Beat) else 0.0


def _with_place(beat: Sign, before: Sign) -> Sign:
    kept = ("stack", "progress", "cpu_s", "site", "waits_in", "waits_group", "waits_number", "waits_bytes", "waits_s",
            "begun", "links", "doing")  # fmt: skip
    return dataclasses.replace(beat, **{name: getattr(before, name) for name in kept})
