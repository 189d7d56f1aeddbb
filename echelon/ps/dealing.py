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
deal.rejoin  what a worker has, told to a server that deals in place of one that is gone
deal.meet    every worker's bytes to every worker; answered once all that are still there have come

A worker whose connection ends is gone: its pieces wait again, and nobody waits for it. What this server dealt and decided is with its
copy before anybody is told of it (noting.py): whoever leads the first shard after it goes on from there, and does not wait until all
workers have come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from echelon import activity
from echelon.errors import UsageError
from echelon.ps.assembly import Answers, Assembly
from echelon.ps.deciding import Answer, Decider
from echelon.ps.noting import NoNotes, Notes
from echelon.ps.pieces import Pieces, numbers, runs
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

    def __init__(self, num_workers: int, notes: Notes | None = None) -> None:
        self.live = set(range(num_workers))
        self.notes = notes or NoNotes()
        self.returned = 0
        """Pieces that came back from workers that are gone."""
        self._samples: dict[int, int] = {}
        """Worker -> samples of what it told to be done."""
        self._epochs: dict[Epoch, Open] = {}
        self._over: set[Epoch] = set()
        self._assembly = Assembly()
        self._heard: set[int] = set()
        """Workers that have come to this server."""
        self._changes = 0
        self._deciders: dict[int, Decider] = {}
        """By model."""
        self._parts: dict[tuple[int, int], Request] = {}
        """(Model, worker) -> its question how to go on."""
        self._stop = False
        self._lock = threading.Lock()
        self._verbs: dict[str, Callable[[Request], Answers]] = {
            "take": self._take,
            "idle": self._idle,
            "done": self._done,
            "leave": self._leave,
            "end": self._end,
            "state": self._state,
            "states": self._states,
            "meet": lambda request: self._assembly.come(request, self.live),
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
            self._begin()
            rank = request.peer.rank
            if rank not in self.live:
                raise UsageError(f"{request.peer} is gone: what it had was dealt to others")
            self._heard.add(rank)
            answers = [*verb(request), *self._look()]
            change = self._changes = self._changes + 1
        self._tell(change, answers)

    def gone(self, peer: Peer) -> None:
        if peer.role == "worker":
            self._lose([peer.rank])

    def _lose(self, ranks: Iterable[int]) -> None:
        with self._lock:
            answers = [answer for rank in ranks for answer in self._without(rank)]
            change = self._changes = self._changes + 1
        self._tell(change, answers)

    def _tell(self, change: int, answers: Answers) -> None:
        if self._heard:  # else another server deals
            self.notes.keep(change, self._newest)
        for answer in answers:
            answer()

    def _without(self, rank: int) -> Answers:
        """This worker is gone."""
        if rank not in self.live:
            return []
        self.live.discard(rank)
        answers: Answers = []
        for key, epoch in list(self._epochs.items()):
            epoch.asking.pop(rank, None)
            self.returned += len(epoch.pieces.lose(rank))
            answers += self._deal(key)
        answers += self._assembly.lose(rank, self.live)
        for model, decider in self._deciders.items():
            self._parts.pop((model, rank), None)
            answers += self._answered(model, decider.lost(rank))
        return answers + self._look()

    # -- in place of a server that is gone ---------------------------------------------------------------------------

    def _newest(self) -> tuple[int, dict[str, Any]]:
        with self._lock:
            return self._changes, self._plain()

    def _plain(self) -> dict[str, Any]:
        """All that a successor must know. Who waits for an answer asks it again."""
        over: dict[int, list[int]] = {}
        for feed, epoch in self._over:
            over.setdefault(feed, []).append(epoch)
        return {
            "live": sorted(self.live), "returned": self.returned, "stop": self._stop, "samples": [list(x) for x in self._samples.items()],
            "over": [[feed, runs(epochs)] for feed, epochs in over.items()],
            "epochs": [[*key, one.pieces.plain()] for key, one in self._epochs.items()],
            "deciders": [[model, decider.plain()] for model, decider in self._deciders.items()],
        }  # fmt: skip

    def _begin(self) -> None:
        """The first worker comes to this server: it may deal in place of one that is gone, and then goes on from what that one left."""
        told = None if self._heard else self.notes.left()
        if told is None:
            return
        self.returned, self._stop = int(told["returned"]), bool(told["stop"])
        self._samples = {int(rank): int(count) for rank, count in told["samples"]}
        self._over = {(int(feed), epoch) for feed, epochs in told["over"] for epoch in numbers(epochs)}
        for feed, epoch, pieces in told["epochs"]:
            self._epochs[int(feed), int(epoch)] = Open(Pieces.read(pieces))
        for model, decider in told["deciders"]:
            self._deciders[int(model)] = Decider.read(decider, self._find, self._more)
        before = {int(rank) for rank in told["live"]}
        seen_gone, self.live = before - self.live, before
        for rank in seen_gone:
            self._without(rank)  # nobody has asked for anything yet
        self.notes.watch(self._missing, self._lose)

    def _missing(self) -> set[int]:
        with self._lock:
            return self.live - self._heard

    def _rejoin(self, request: Request) -> Answers:
        """A worker tells a server that deals in place of another what it has; what that one decided is known here."""
        head, rank = request.head, request.peer.rank
        self._count(request)
        question = head["question"]
        decider = self._deciders.get(int(question["model"])) if question else None
        settled = decider is not None and decider.fate(rank, int(question["number"])) is not None
        asked = [(int(f), int(e), int(n)) for f, e, n in question["pieces"]] if settled else []
        answers: Answers = [request.answer]
        for feed, epoch, total, done, has in head["epochs"]:
            at, mine = (int(feed), int(epoch)), [int(n) for n in has]
            for number in (n for f, e, n in asked if (f, e) == at and n in mine):
                mine.remove(
                    number
                )  # it counted, or was dealt again: this worker has it only if to it, and then twice
            for key in [key for key in self._epochs if key[0] == at[0] and key[1] <= at[1]]:
                pieces = self._epochs[key].pieces
                if key < at:  # which it left
                    pieces.lose(rank)
                else:
                    if total is not None and pieces.total is None:
                        pieces.end(int(total))
                    pieces.adopt(map(int, done), mine, rank)
                answers += self._deal(key)
        return answers + self._assembly.told(request)

    # -- pieces ----------------------------------------------------------------------------------------------------

    def _take(self, request: Request) -> Answers:
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

    def _idle(self, request: Request) -> Answers:
        key = _epoch(request)
        answers: Answers = [request.answer]
        if key in self._epochs and request.peer.rank in self._epochs[key].asking:
            self._epochs[key].idle.add(request.peer.rank)
            answers += self._deal(key)
        return answers

    def _done(self, request: Request) -> Answers:
        self._count(request)
        return self._told(request, lambda p, numbers: p.done(numbers, request.peer.rank))

    def _count(self, request: Request) -> None:
        """How many samples a worker has used so far, as it tells: what it says is the last that is heard of it if it dies."""
        rank = request.peer.rank
        self._samples[rank] = max(self._samples.get(rank, 0), int(request.head.get("samples", 0)))

    def _leave(self, request: Request) -> Answers:
        key, rank = _epoch(request), request.peer.rank
        answers: Answers = [request.answer]
        if key in self._epochs:
            asked = self._epochs[key].asking.pop(rank, None)
            answers += [_later(asked, {"over": True})] if asked is not None else []
            self._epochs[key].pieces.lose(rank)
            answers += self._deal(key)
        for model, decider in self._deciders.items():
            answers += self._answered(model, decider.left(rank))  # until it comes with a part again
        return answers

    def _end(self, request: Request) -> Answers:
        return self._told(request, lambda p, _: p.end(int(request.head["total"])))

    def _told(self, request: Request, act: Callable[[Pieces, list[int]], object]) -> Answers:
        key = _epoch(request)
        answers: Answers = [request.answer]
        if key in self._epochs:
            act(self._epochs[key].pieces, [int(n) for n in request.head.get("pieces", ())])
            answers += self._deal(key)
        return answers

    def _state(self, request: Request) -> Answers:
        key = _epoch(request)
        known = self._epochs.get(key)
        low, above = known.pieces.state() if known is not None else (0, [])
        over = key in self._over
        return [
            lambda: request.answer({"known": known is not None, "over": over, "low": low, "above": above})
        ]

    def _states(self, request: Request) -> Answers:
        mine = [
            (e, one.pieces) for (feed, e), one in self._epochs.items() if feed == int(request.head["feed"])
        ]
        states = [[epoch, *pieces.state()] for epoch, pieces in mine]
        return [lambda: request.answer({"states": states})]

    def _deal(self, key: Epoch) -> Answers:
        """Answers those who ask, as far as there are pieces."""
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

    def _end_of_epoch(self) -> dict[str, object]:
        return {"over": True, "live": sorted(self.live)}

    # -- steps of the first parts ------------------------------------------------------------------------------------

    def _part(self, request: Request) -> Answers:
        head, rank, model = request.head, request.peer.rank, int(request.head["model"])
        self._stop = self._stop or bool(head["stop"])
        self._parts[model, rank] = request
        found = self._decider(model, int(head["backup"]), int(head["aggregate"]))
        numbers = int(head["number"]), int(head["version"]), int(head["count"])
        return self._answered(model, found.part(rank, *numbers, head["pieces"]))

    def _catch_up(self, request: Request) -> Answers:
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

    def _look(self) -> Answers:
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

    def _answered(self, model: int, found: list[Answer]) -> Answers:
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
