"""Workers that take pieces of the data by themselves (async, backup): how they get them, and how those that are there meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from echelon.clock import Deadline
from echelon.comm.group import Lost
from echelon.control.roster import JOINED
from echelon.data.deal import Cut, Done
from echelon.ps.desk import Desk
from echelon.ps.live import LiveGroup
from echelon.ps.taking import Taker
from echelon.ps.worker import Servers

if TYPE_CHECKING:
    from echelon.run import Run

TOGETHER_S = 1800.0
T = TypeVar("T")


class Apart:
    """One a run, the same calls in the same order on every worker. `group` is where they meet, outside of their steps."""

    def __init__(self, servers: Servers, rank: int, size: int, tells: bool = True) -> None:
        self.servers, self.rank, self.tells = servers, rank, tells
        self.term: int | None = None
        self.desk = Desk(servers)
        self.group = LiveGroup(self.desk, servers.new_model(), rank, size)

    def feed(self) -> FeedDeal:
        """For one loader."""
        return FeedDeal(self, self.servers.new_model())

    @property
    def seat(self) -> tuple[int, int]:
        """This worker's place among those that took part in the last meeting, and how many they are."""
        return self.group.live.index(self.rank), len(self.group.live)


@dataclass
class FeedDeal:
    """See prepare.loader.Deal. `number` names the loader to the server."""

    apart: Apart
    number: int

    def begin(self, epoch: int, total: int | None, done: Done) -> Taker:
        taker = Taker(self.apart.desk, self.number, epoch, total, done.low, done.above)
        taker.tells = self.apart.tells
        return taker

    def states(self) -> dict[int, tuple[int, list[int]]]:
        reply = self.apart.desk.ask("deal.states", {"feed": self.number}, what="which batches are done")
        return {int(epoch): (int(low), list(above)) for epoch, low, above in reply.head["states"]}

    def shared(self) -> Cut:
        rank, size = self.apart.seat
        return Cut(rank, size)


def all_here(run: Run) -> None:
    """Waits for all workers. Where each counts its own steps, the largest count is the run's once all are at one place."""
    machine, prepared = run.machine, run.prepared
    if prepared.rounds is not None:
        prepared.rounds.gather()
    if prepared.apart is not None and machine.committed:
        for loader in machine.loaders:
            loader.mark()
    term = run.member.term if run.member is not None else 0
    told = torch.tensor([float(run.global_step), float(run.keeping.stopping), float(term)])
    outcome = run.exchange.group.all_reduce(told, "max").wait(Deadline.after(TOGETHER_S))
    if isinstance(outcome, Lost):
        machine.side_losses.append(outcome)
    machine.counters.global_step = int(told[0])
    if prepared.apart is not None:
        prepared.apart.term = int(told[2])
    machine.gathered, machine.leaving = True, bool(told[1])


def steady(run: Run, call: Callable[[], T]) -> T:
    """`call()`, by all workers at one place. If one goes meanwhile, its part of it is gone with it, and the others make it once more."""
    while True:
        run.machine.drain(all_here=True)
        seat = run.prepared.seat
        value = call()
        if run.prepared.seat == seat:
            return value


def turn(run: Run) -> Callable[[], bool] | None:
    """Is this worker the lowest of those that are still there, as the coordinator knows it? None where nobody goes on without another."""
    member = run.member
    if run.prepared.apart is None or member is None:
        return None
    return lambda: run.rank == min(rank for rank, seat in member.roster().items() if seat["state"] == JOINED)
