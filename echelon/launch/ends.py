"""How the processes of a run ended, as a supervisor knows it, and what their scripts said: what verdicts are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from echelon.control.roster import SERVER, WORKER, Who
from echelon.errors import PREEMPTED
from echelon.events import Configured, Event, Failed
from echelon.launch import blame, restart
from echelon.launch.blame import Exit, Verdict

IN_ORDER = (0, PREEMPTED)


class Ends:
    """Of all workers and servers on the first host, of its own ones on a further host."""

    def __init__(self, strategy: Mapping[str, Any] | None = None) -> None:
        self.strategy: Mapping[str, Any] = strategy or {}
        """The run's fields as far as they are known: what was typed, and once the script called init, all that count."""

        self.workers: dict[int, Exit] = {}
        self.servers: dict[int, Exit] = {}
        self.failures: list[Failed] = []

    def hear(self, event: Event) -> None:
        if isinstance(event, Failed):
            self.failures.append(event)
        elif isinstance(event, Configured):
            self.strategy = event.strategy

    def put(self, who: Who, end: Exit) -> None:
        (self.servers if who.role == SERVER else self.workers)[who.rank] = end

    def without(self, who: Who, num_workers: int) -> str:
        """Do the others go on without this worker? What people are told then; its end is no failure of the run."""
        end = self.workers.get(who.rank) if who.role == WORKER else None
        follows = (
            restart.without(who, end.code, self.strategy, num_workers - len(self.workers)) if end else None
        )
        if end is None or follows is None:
            return ""
        self.workers[who.rank] = replace(end, spared=True)
        return f"{who} was killed (signal {end.signal}): the others go on without it, {follows.reason}"

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
        return blame.judge(self.workers, self.failures, self.servers)

    def settle_s(self, num_workers: int) -> float:
        return blame.settle_s(self.workers, self.failures, num_workers, self.servers)

    def servers_left(self, code: int, awaited: Iterable[int]) -> bool:
        """Need the servers `awaited` no more time? In a run that ended in good order they are sent home and leave by
        themselves; in any other they have nothing to keep."""
        return code not in IN_ORDER or set(awaited) <= self.servers.keys()
