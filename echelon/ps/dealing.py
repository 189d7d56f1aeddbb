"""Dealing, as the first server offers it: pieces of an epoch to workers that ask, and meetings of those that are there.

deal.take    the next piece of an epoch; answered when there is one, or when all are done
deal.idle    the worker waits for what it asked for: until then it is answered only while plenty is left
deal.done    these pieces are in updates
deal.leave   the worker left the epoch: others may have what it did not use
deal.end     so many pieces there are
deal.state   which pieces of an epoch are done, for a checkpoint; deal.states: of all epochs of a loader that are open
deal.part    a part that all servers hold: answered when its worker may go on, with the updates that were made (deciding.py)
deal.catch_up  the same without a part
deal.hello   is this the server that deals now?
deal.rejoin  what a worker knows of epochs and meetings, told to a server that deals in place of one that is gone
deal.meet    every worker's bytes to every worker; answered once all that are still there have come

A worker whose connection ends is gone: its pieces wait again, and nobody waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echelon import activity
from echelon.errors import UsageError
from echelon.ps.deciding import Answer, Decider
from echelon.ps.pieces import Pieces
from echelon.ps.service import Peer, Request
from echelon.ps.together import sense

NAME = "deal"

Epoch = tuple[int, int]
"""(The loader's number, epoch)."""


@dataclass
class Open:
    """An epoch that is being dealt."""

    pieces: Pieces
    asking: dict[int, Request] = field(default_factory=dict)
    """Worker -> its take, in the order in which they came."""
    idle: set[int] = field(default_factory=set)


class Dealing:
    """A service of a host (service.Service). One a server; workers ask the first one."""

    def __init__(self, num_workers: int) -> None:
        self.live = set(range(num_workers))
        self.returned = 0
        """Pieces that came back from workers that are gone."""
        self._samples: dict[int, int] = {}
        """Worker -> samples of what it told to be done."""
        self._epochs: dict[Epoch, Open] = {}
        self._over: set[Epoch] = set()
        self._meetings: dict[tuple[int, int], dict[int, Request]] = {}
        self._results: dict[tuple[int, int], tuple[list[int], Tensor]] = {}
        """Meetings that some have the result of, told by them."""
        self._latest: dict[int, int] = {}
        """Loader -> its last epoch that a worker told of."""
        self._generation = 0
        self._awaited: set[int] = set()
        """Workers that have not told yet what they know, where this server deals in place of one that is gone."""
        self._deciders: dict[int, Decider] = {}
        """By model."""
        self._parts: dict[tuple[int, int], Request] = {}
        """(Model, worker) -> its question how to go on."""
        self._stop = False
        self._lock = threading.Lock()
        self._verbs: dict[str, Callable[[Request], list[Callable[[], None]]]] = {
            "take": self._take,
            "idle": self._idle,
            "done": self._done,
            "leave": self._leave,
            "end": self._end,
            "state": self._state,
            "states": self._states,
            "meet": self._meet,
            "hello": lambda request: [request.answer],
            "rejoin": self._rejoin,
            "part": self._part,
            "catch_up": self._catch_up,
        }

    def called(self, request: Request) -> None:
        verb = self._verbs.get(request.verb)
        if verb is None or request.peer.role != "worker":
            raise UsageError(f"{request.peer} called {request.verb}, which servers do not offer it")
        activity.moved()
        with sense(request), self._lock:
            if request.peer.rank not in self.live:
                raise UsageError(f"{request.peer} is gone: what it had was dealt to others")
            answers = [*verb(request), *self._look()]
        for answer in answers:
            answer()

    def gone(self, peer: Peer) -> None:
        if peer.role != "worker":
            return
        with self._lock:
            self.live.discard(peer.rank)
            self._awaited.discard(peer.rank)
            answers = []
            for key, epoch in list(self._epochs.items()):
                epoch.asking.pop(peer.rank, None)
                self.returned += len(epoch.pieces.lose(peer.rank))
                answers += self._deal(key)
            for key in list(self._meetings):
                self._meetings[key].pop(peer.rank, None)
                answers += self._met(key)
            for model, decider in self._deciders.items():
                self._parts.pop((model, peer.rank), None)
                answers += self._answered(model, decider.lost(peer.rank))
            answers += self._look()
        for answer in answers:
            answer()

    # -- pieces ----------------------------------------------------------------------------------------------------

    def _take(self, request: Request) -> list[Callable[[], None]]:
        head, rank = request.head, request.peer.rank
        key = _epoch(request)
        if key in self._over:
            return [_later(request, self._end_of_epoch())]
        if key not in self._epochs:
            self._epochs[key] = Open(Pieces(int(head["low"]), map(int, head["above"])))
        found = self._epochs[key]
        if head["total"] is not None and found.pieces.total is None:
            found.pieces.end(int(head["total"]))
        if rank in found.asking:
            raise UsageError(f"{request.peer} asks for a second piece before it got the first")
        found.asking[rank] = request
        if head["idle"]:
            found.idle.add(rank)
        return self._deal(key)

    def _idle(self, request: Request) -> list[Callable[[], None]]:
        key = _epoch(request)
        answers: list[Callable[[], None]] = [request.answer]
        if key in self._epochs and request.peer.rank in self._epochs[key].asking:
            self._epochs[key].idle.add(request.peer.rank)
            answers += self._deal(key)
        return answers

    def _done(self, request: Request) -> list[Callable[[], None]]:
        self._count(request)
        return self._told(request, lambda p, numbers: p.done(numbers, request.peer.rank))

    def _count(self, request: Request) -> None:
        """How many samples a worker has used so far, as it tells: what it says is the last that is heard of it if it dies."""
        rank = request.peer.rank
        self._samples[rank] = max(self._samples.get(rank, 0), int(request.head.get("samples", 0)))

    def _leave(self, request: Request) -> list[Callable[[], None]]:
        key, rank = _epoch(request), request.peer.rank
        answers: list[Callable[[], None]] = [request.answer]
        if key in self._epochs:
            asked = self._epochs[key].asking.pop(rank, None)
            answers += [_later(asked, {"over": True})] if asked is not None else []
            self._epochs[key].pieces.lose(rank)
            answers += self._deal(key)
        for model, decider in self._deciders.items():
            answers += self._answered(model, decider.left(rank))  # until it comes with a part again
        return answers

    def _end(self, request: Request) -> list[Callable[[], None]]:
        return self._told(request, lambda p, _: p.end(int(request.head["total"])))

    def _told(self, request: Request, act: Callable[[Pieces, list[int]], object]) -> list[Callable[[], None]]:
        key = _epoch(request)
        answers: list[Callable[[], None]] = [request.answer]
        if key in self._epochs:
            act(self._epochs[key].pieces, [int(n) for n in request.head.get("pieces", ())])
            answers += self._deal(key)
        return answers

    def _state(self, request: Request) -> list[Callable[[], None]]:
        key = _epoch(request)
        known = self._epochs.get(key)
        low, above = known.pieces.state() if known is not None else (0, [])
        over = key in self._over
        return [
            lambda: request.answer({"known": known is not None, "over": over, "low": low, "above": above})
        ]

    def _states(self, request: Request) -> list[Callable[[], None]]:
        mine = [
            (e, one.pieces) for (feed, e), one in self._epochs.items() if feed == int(request.head["feed"])
        ]
        states = [[epoch, *pieces.state()] for epoch, pieces in mine]
        return [lambda: request.answer({"states": states})]

    def _deal(self, key: Epoch) -> list[Callable[[], None]]:
        """Answers those who ask, as far as there are pieces."""
        if self._awaited:
            return []
        found, answers = self._epochs[key], []
        pieces = found.pieces
        for rank, request in list(found.asking.items()):
            if pieces.over:
                answers.append(_later(request, self._end_of_epoch()))
            elif rank not in found.idle and not pieces.plenty(len(self.live)):
                continue
            elif (number := pieces.take(rank)) is not None:
                answers.append(_later(request, {"piece": number, "low": pieces.low}))
                for decider in self._deciders.values():
                    decider.took(rank)
            else:
                continue
            del found.asking[rank]
            found.idle.discard(rank)
        if pieces.over:
            self._over.add(key)
            del self._epochs[key]
        return answers

    def _rejoin(self, request: Request) -> list[Callable[[], None]]:
        """A worker tells a server that deals in place of another what it knows. Nothing is dealt before all have."""
        head, rank = request.head, request.peer.rank
        self._count(request)
        if int(head["generation"]) > self._generation:
            self._generation, self._awaited = int(head["generation"]), set(self.live)
        if head["live"]:
            self.live &= {int(r) for r in head["live"]} | {rank}
        self._awaited = (self._awaited & self.live) - {rank}
        for feed, epoch, low, above, total, done, out, over in head["epochs"]:
            key = int(feed), int(epoch)
            self._latest[key[0]] = max(key[1], self._latest.get(key[0], 0))
            if over or key[1] < self._latest[key[0]]:  # a worker begins the next one when the last is over
                self._over.add(key)
            self._over |= {k for k in self._epochs if k[0] == key[0] and k[1] < self._latest[key[0]]}
            if key in self._over:
                continue
            found = self._epochs.setdefault(key, Open(Pieces(int(low), map(int, above))))
            if total is not None:
                found.pieces.end(int(total))
            found.pieces.adopt(map(int, done), map(int, out), rank)
        answers: list[Callable[[], None]] = [request.answer]
        if head["meeting"]:
            told = head["meeting"]
            ranks, rows = [int(r) for r in told["ranks"]], request.tensors[0].clone()
            self._results[int(told["group"]), int(told["number"])] = (ranks, rows)
            met = self._meetings.pop((int(told["group"]), int(told["number"])), {})
            answers += [lambda r=r: r.answer({"ranks": ranks}, [rows]) for r in met.values()]  # type: ignore[misc]
        for key in list(self._epochs):
            answers += self._over_for(key) if key in self._over else self._deal(key)
        for key in list(self._meetings):
            answers += self._met(key)
        return answers

    def _over_for(self, key: Epoch) -> list[Callable[[], None]]:
        return [_later(asked, self._end_of_epoch()) for asked in self._epochs.pop(key).asking.values()]

    def _end_of_epoch(self) -> dict[str, object]:
        return {"over": True, "live": sorted(self.live)}

    # -- meetings --------------------------------------------------------------------------------------------------

    def _meet(self, request: Request) -> list[Callable[[], None]]:
        key = int(request.head["group"]), int(request.head["number"])
        if key in self._results:
            ranks, rows = self._results[key]
            return [lambda: request.answer({"ranks": ranks}, [rows])]
        self._meetings.setdefault(key, {})[request.peer.rank] = request
        return self._met(key)

    def _met(self, key: tuple[int, int]) -> list[Callable[[], None]]:
        here = self._meetings[key]
        if not here or self.live - here.keys():
            return []
        del self._meetings[key]
        ranks = sorted(here)
        brought = [here[rank].tensors[0].view(-1) for rank in ranks]
        if len({(x.dtype, x.numel()) for x in brought}) > 1:
            told = ", ".join(f"worker {r} {x.numel()} bytes" for r, x in zip(ranks, brought, strict=True))
            error = UsageError(
                f"the workers are in different calls: {told}", remedy="All workers make the same calls."
            )
            return [lambda r=r: r.refuse(error) for r in here.values()]  # type: ignore[misc]
        rows = torch.stack(brought)
        return [lambda r=r: r.answer({"ranks": ranks}, [rows]) for r in here.values()]  # type: ignore[misc]

    # -- steps of the first parts ------------------------------------------------------------------------------------

    def _part(self, request: Request) -> list[Callable[[], None]]:
        head, rank, model = request.head, request.peer.rank, int(request.head["model"])
        self._stop = self._stop or bool(head["stop"])
        self._parts[model, rank] = request
        found = self._decider(model, int(head["backup"]), int(head["aggregate"]))
        numbers = int(head["number"]), int(head["version"]), int(head["count"])
        return self._answered(model, found.part(rank, *numbers, head["pieces"]))

    def _catch_up(self, request: Request) -> list[Callable[[], None]]:
        head, rank, model = request.head, request.peer.rank, int(request.head["model"])
        self._parts[model, rank] = request
        found = self._decider(model, int(head["backup"]), int(head["aggregate"]))
        return self._answered(model, [found.catch_up(rank, int(head["version"]), bool(head["begins"]))])

    def _decider(self, model: int, backup: int, aggregate: int) -> Decider:
        if model not in self._deciders:
            made = self._deciders[model] = Decider(self.live, backup, aggregate, self._find, self._more)
            for rank in {rank for epoch in self._epochs.values() for rank in epoch.pieces.holders()}:
                made.took(rank)
        return self._deciders[model]

    def _find(self, feed: int, epoch: int) -> Pieces | None:
        found = self._epochs.get((feed, epoch))
        return found.pieces if found is not None else None

    def _more(self) -> bool:
        return any(epoch.pieces.waiting for epoch in self._epochs.values())

    def _look(self) -> list[Callable[[], None]]:
        """Pieces came back or are used up: what does that change for those who decide?"""
        if not self._deciders:
            return []
        waiting = {rank for epoch in self._epochs.values() for rank in epoch.asking if rank in epoch.idle}
        answers = []
        for model, decider in self._deciders.items():
            for rank in waiting:
                answers += self._answered(model, decider.idle(rank))
            answers += self._answered(model, decider.look())
        for key in list(self._epochs):
            answers += self._deal(key)
        return answers

    def _answered(self, model: int, found: list[Answer]) -> list[Callable[[], None]]:
        answers = []
        for one in found:
            request = self._parts.pop((model, one.worker), None)
            if request is not None:
                head = {"version": one.version, "log": one.log, "used": one.used, "stop": self._stop}
                answers.append(_later(request, head))
        return answers

    @property
    def samples(self) -> dict[int, int]:
        """Worker -> samples of its batches, or parts of batches, that are in updates."""
        found = dict(self._samples)
        for decider in list(self._deciders.values()):
            for rank, count in list(decider.samples.items()):
                found[rank] = found.get(rank, 0) + count
        return found

    @property
    def dropped(self) -> int:
        """Parts that came too late for their step."""
        return sum(decider.dropped for decider in list(self._deciders.values()))


def _epoch(request: Request) -> Epoch:
    return int(request.head["feed"]), int(request.head["epoch"])


def _later(request: Request, head: dict[str, object]) -> Callable[[], None]:
    return lambda: request.answer(head)
