"""How the processes of a run ended, as a supervisor knows it, and what their scripts said: what verdicts are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from echelon.control.roster import SERVER, WORKER, Who
from echelon.errors import PREEMPTED
from echelon.events import Beat, Configured, Entered, Event, Facts, Failed, WorkersBack
from echelon.launch import blame, restart
from echelon.launch.blame import Exit, Verdict
from echelon.show.lines import fold

IN_ORDER = (0, PREEMPTED)


class Ends:
    """Of all workers and servers on the first host, of its own ones on a further host."""

    def __init__(self, strategy: Mapping[str, Any] | None = None) -> None:
        self.strategy: Mapping[str, Any] = strategy or {}
        """The run's fields as far as they are known: what was typed, and once the script called init, all that count."""

        self.workers: dict[int, Exit] = {}
        self.servers: dict[int, Exit] = {}
        self.failures: list[Failed] = []
        self.step = 0
        self.training = False
        self.met: set[int] = set()
        """Workers whose scripts have called echelon.init."""
        self.stays_away: dict[Who, str] = {}
        """Whoever is not started again, and why."""
        self.replaced: dict[Who, Exit] = {}
        """How those ended that were started again, until they are at work: if they never are, that was the first failure."""
        self._rows: dict[Who, tuple[int, int]] = {}
        """Who -> the run's step when it last ended, and how often it ended at that step."""

    def hear(self, event: Event) -> None:
        if isinstance(event, Failed):
            self.failures.append(event)
        elif isinstance(event, Configured):
            self.strategy = event.strategy
        elif isinstance(event, Entered) and event.rank is not None:
            self.met.add(event.rank)
        elif isinstance(event, Beat):
            self.step = max(self.step, event.step)
        elif isinstance(event, WorkersBack):
            self.step = max(self.step, event.step)
            for rank in event.ranks:
                self.replaced.pop(Who(WORKER, rank), None)
        self.training = self.training or isinstance(event, Facts) or self.step > 0

    def follows(
        self, who: Who, end: Exit, incarnation: int, world: tuple[int, int], stopping: bool
    ) -> restart.Again | restart.GiveUp:
        """Is it started again, in a run of so many workers and servers? If so, how it ended counts no more once its successor is at
        work."""
        before, count = self._rows.get(who, (-1, 0))
        count = count + 1 if before == self.step else 1
        self._rows[who] = (self.step, count)
        spoke = any((f.role, f.rank) == tuple(who) for f in self.failures)
        num_workers, num_servers = world
        met = self.training or who.rank in self.met
        known = restart.Known(num_workers, met, self.training, stopping, spoke, count)
        found = restart.after_end(who, end.code, incarnation, self.strategy, num_servers, known)
        if isinstance(found, restart.GiveUp):
            self.stays_away[who] = found.reason
        else:
            self.forget(who)
            if who.role == WORKER:
                self.replaced[who] = end
        return found

    def put(self, who: Who, end: Exit) -> None:
        (self.servers if who.role == SERVER else self.workers)[who.rank] = end

    def without(self, who: Who, num_workers: int, say: Callable[..., None]) -> bool:
        """Do the others go on without this worker? Then its end is no failure of the run, and people are told."""
        end = self.workers.get(who.rank) if who.role == WORKER else None
        left = num_workers - len(self.workers)
        follows = restart.without(who, end.code, self.strategy, left) if end is not None else None
        if end is None or follows is None:
            return False
        self.workers[who.rank] = replace(end, spared=True)
        say(*fold(f"{who} was killed (signal {end.signal}): the others go on without it, {follows.reason}"))
        return True

    @property
    def spared(self) -> list[int]:
        return sorted(rank for rank, end in self.workers.items() if end.spared)

    def forget(self, who: Who) -> None:
        """It is started again: how it ended counts no more."""
        (self.servers if who.role == SERVER else self.workers).pop(who.rank, None)
        self.failures = [f for f in self.failures if (f.role, f.rank) != tuple(who)]

    @property
    def everybody(self) -> set[Who]:
        return {Who(WORKER, rank) for rank in self.workers} | {Who(SERVER, rank) for rank in self.servers}

    def verdict(self) -> Verdict | None:
        """The first failure. Where there are only consequences, it is that of whoever was started again and never came to work."""
        replaced = {who.rank: end for who, end in self.replaced.items() if who.role == WORKER}
        found = blame.judge(self.workers, self.failures, self.servers)
        if found is None or found.failed is None or not found.failed.consequence or not replaced:
            return found
        return blame.judge(self.workers | replaced, self._others(replaced), self.servers)

    def _others(self, replaced: Iterable[int]) -> list[Failed]:
        return [f for f in self.failures if f.role != WORKER or f.rank not in set(replaced)]

    def settle_s(self, num_workers: int) -> float:
        return blame.settle_s(self.workers, self.failures, num_workers, self.servers)

    def servers_left(self, code: int, awaited: Iterable[int]) -> bool:
        """Need the servers `awaited` no more time? In a run that ended in good order they are sent home and leave by
        themselves; in any other they have nothing to keep."""
        return code not in IN_ORDER or set(awaited) <= self.servers.keys()
