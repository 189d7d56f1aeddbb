"""Training with copies (update=local), as a server offers it: workers step by themselves and meet here now and then.

local.open     the ranges that a server holds of a model; worker 0 brings values, rule, and what an outer optimizer had
local.meet     every worker's copy and what it weighs; all get what they agree on, or nothing if nobody took a step
local.add      one worker's delta, added at once (geo); it gets the values
local.gather   a worker is at one place and waits for all others (geo); then it gets the values
local.state    the outer optimizer's momentum
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from echelon import activity
from echelon.errors import UsageError
from echelon.ps.meetings import Place, Verdict, verdict, weights
from echelon.ps.outer import Outer
from echelon.ps.recipes import Recipe
from echelon.ps.service import Peer, Request
from echelon.ps.together import Together, carry_out, sense

NAME = "local"
"""What a head of the wrong form ends in, wherever it is first read."""


class Model:
    """One model: its values, and where the workers are (geo)."""

    def __init__(self, outer: Outer, num_workers: int) -> None:
        self.outer, self.lock = outer, threading.Lock()
        self.places = [Place(0, False, False)] * num_workers
        self.waiting: dict[int, Request] = {}
        """Rank -> its local.gather."""


class Local:
    """A service of a host (service.Service). One a server; workers come over connections of their own."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers, self.updates = num_workers, 0
        self.together = Together(num_workers)
        self._models: dict[int, Model] = {}
        self._verbs: dict[str, Callable[[Request], None]] = {
            "open": self._open,
            "meet": self._meet,
            "add": self._add,
            "gather": self._gather,
            "state": self._state,
        }

    def called(self, request: Request) -> None:
        verb = self._verbs.get(request.verb)
        if verb is None or request.peer.role != "worker":
            raise UsageError(f"{request.peer} called {request.verb}, which servers do not offer it")
        if not 0 <= request.peer.rank < self.num_workers:
            raise UsageError(f"there is no worker {request.peer.rank} of {self.num_workers}")
        activity.moved()
        with sense(request):
            verb(request)

    def gone(self, peer: Peer) -> None:
        if peer.role == "worker":
            self.together.lose(peer.rank, "ended its connection to a parameter server")
            for model in list(self._models.values()):
                with model.lock:
                    waiting, model.waiting = model.waiting, {}
                for rank, request in waiting.items():
                    lost = self.together.lost
                    if rank != peer.rank and lost is not None:
                        request.refuse(lost)

    # -- all of them -----------------------------------------------------------------------------------------------

    def _open(self, request: Request) -> None:
        number = int(request.head["model"])
        all_of_them = self.together.add(("open", number), request)
        if all_of_them is not None:
            carry_out(all_of_them, lambda: self._begin(number, all_of_them))

    def _begin(self, number: int, requests: list[Request]) -> None:
        first = requests[0]
        for other in requests[1:]:
            if other.head["ranges"] != first.head["ranges"] or other.head["rule"] != first.head["rule"]:
                raise UsageError(
                    f"worker {other.peer.rank} has other parameters in model {number} than worker 0",
                    remedy="Every worker prepares the same models, in the same order.",
                )
        rule = first.head["rule"]
        recipe = Recipe.from_plain(rule) if rule is not None else None
        values, *momentum = first.tensors
        outer = Outer(first.head["ranges"], values, recipe, momentum[0] if momentum else None)
        self._models[number] = Model(outer, self.num_workers)
        for one in requests:
            one.answer()

    def _meet(self, request: Request) -> None:
        model = self._models[int(request.head["model"])]
        key = ("meet", int(request.head["model"]), int(request.head["number"]))
        all_of_them = self.together.add(key, request)
        if all_of_them is not None:
            with model.lock:
                carry_out(all_of_them, lambda: self._agree(model, all_of_them))

    def _agree(self, model: Model, requests: list[Request]) -> None:
        decided = verdict([Place.from_plain(one.head["place"]) for one in requests])
        counts = [max(0, int(one.head["count"])) for one in requests]
        parts = []
        for one, weight in zip(requests, weights(counts), strict=True):
            if weight:  # who took no step brings nothing
                model.outer.check(one.tensors[0])
                parts.append((one.tensors[0], weight))
        if parts:
            model.outer.meet(parts)
            self.updates += 1
        for one in requests:
            one.answer({**_told(decided), "moved": bool(parts)}, [model.outer.memory] if parts else [])

    # -- one by one (geo) ------------------------------------------------------------------------------------------

    def _add(self, request: Request) -> None:
        model = self._models[int(request.head["model"])]
        delta, place = request.tensors[0], Place.from_plain(request.head["place"])
        model.outer.check(delta)
        with model.lock:
            model.outer.add(delta, 1.0 / self.num_workers)
            self.updates += 1
            request.answer({}, [model.outer.memory])
            self._now_at(model, request.peer.rank, place)

    def _gather(self, request: Request) -> None:
        model, rank = self._models[int(request.head["model"])], request.peer.rank
        place = Place.from_plain(request.head["place"])
        with model.lock:
            lost = self.together.lost
            if lost is not None:
                raise lost
            if rank in model.waiting:
                raise UsageError(f"worker {rank} waits already")
            model.waiting[rank] = request
            self._now_at(model, rank, place)

    def _now_at(self, model: Model, rank: int, place: Place) -> None:
        """Those who waited for this worker go on."""
        model.places[rank] = place
        decided = verdict(model.places)
        for other, request in list(model.waiting.items()):
            if decided.ended or decided.passed >= model.places[other].reached:
                del model.waiting[other]
                model.places[other] = replace(model.places[other], over=False)
                request.answer(_told(decided), [model.outer.memory])

    def _state(self, request: Request) -> None:
        model = self._models[int(request.head["model"])]
        with model.lock:
            momentum = model.outer.momentum()
            request.answer({}, [momentum] if momentum is not None else [])


def _told(decided: Verdict) -> dict[str, Any]:
    return {"passed": decided.passed, "ended": decided.ended, "stop": decided.stop}
