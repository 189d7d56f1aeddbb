"""Training, as a server offers it: sums for workers that apply them, or the whole optimizer step.

train.sum      every worker's addends of a flat piece; all get the sum                       apply=worker
train.open     the ranges that a server holds of a model; worker 0 brings their values       apply=server
train.push     gradients of some ranges: provisional, answered once they were used or taken back
train.back     takes a push back
train.squares  what every worker's pushes sum up to: squares and whether it is finite
train.apply    every worker's optimizer steps: all get the new values
train.step     a worker's part of an update and its step in one, where workers are not at one place (steps.py)
train.pull     the values as they are
train.values   worker 0 changed values itself
train.state    the optimizer's state of some ranges
train.load     … and back
train.enter    a worker is in this term: told once all are. What was pushed and not used is void
train.settle   all workers know what every server has: an update that some servers lack did not happen
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from echelon import activity
from echelon.errors import EchelonError, PeerLost, UsageError, WireError, WorldError
from echelon.ps.recipes import Recipe
from echelon.ps.service import Peer, Request
from echelon.ps.shard import Shard
from echelon.ps.staleness import Staleness
from echelon.ps.steps import Updates, check_same
from echelon.ps.together import Together, refuse_all

NAME = "train"
SENSELESS = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RuntimeError)
"""What a head of the wrong form ends in, wherever it is first read."""


class Training:
    """A service of a host (service.Service). One a server; workers come over connections of their own."""

    def __init__(self, num_workers: int, num_servers: int = 1) -> None:
        self.num_workers, self.num_servers = num_workers, num_servers
        self.together = Together(num_workers)
        self.term = 0
        self._entered: dict[int, tuple[int, int]] = {}
        """Worker -> the term it is in, and its incarnation. Before the first change all are in term 0."""
        self.updates = self.sums = 0
        self._lock = threading.Lock()
        self._shards: dict[int, tuple[threading.Lock, Shard]] = {}
        self._updates: dict[int, Updates] = {}
        self._early: dict[int, list[tuple[Request, list[tuple[Any, ...]]]]] = {}
        """Opened by workers before worker 0 brought the values."""
        self._verbs: dict[str, Callable[[Request], None]] = {
            "sum": self._sum,
            "open": self._open,
            "push": self._push,
            "back": self._back,
            "squares": self._squares,
            "apply": self._apply,
            "step": self._step_apart,
            "values": self._values,
            "pull": self._pull,
            "state": self._state,
            "load": self._load,
            "enter": self._enter,
            "settle": self._settle,
        }

    def called(self, request: Request) -> None:
        verb = self._verbs.get(request.verb)
        if verb is None or request.peer.role != "worker":
            raise UsageError(f"{request.peer} called {request.verb}, which servers do not offer it")
        if not 0 <= request.peer.rank < self.num_workers:
            raise UsageError(f"there is no worker {request.peer.rank} of {self.num_workers}")
        activity.moved()
        if request.verb != "enter" and self._entered.get(request.peer.rank, (0, 0))[0] < self.term:
            raise PeerLost(f"{request.peer} called {request.verb} in a term that is over")
        try:
            verb(request)
        except SENSELESS as error:
            raise _senseless(request, error) from None

    def gone(self, peer: Peer) -> None:
        if peer.role == "worker" and peer.incarnation >= self._entered.get(peer.rank, (0, 0))[1]:
            self.together.lose(peer.rank, "ended its connection to a parameter server")
            with self._lock:
                early, self._early = self._early, {}
            for request, _ in (one for waiting in early.values() for one in waiting):
                request.refuse(self.together.lost or PeerLost(f"{peer} is gone", peers=(peer.rank,)))

    def stale(self) -> list[int]:
        """By how many updates the parts of all models were behind: p50, p99, max."""
        found = Staleness()
        for updates in list(self._updates.values()):
            found.merge(updates.staleness.histogram(), updates.staleness.max)
        return [found.p50, found.p99, found.max] if found.total else []

    # -- terms -----------------------------------------------------------------------------------------------------

    def _enter(self, request: Request) -> None:
        term = int(request.head["term"])
        with self._lock:
            if term < self.term:
                raise PeerLost(f"term {term} is over: this is term {self.term}")
            if term > self.term:
                self._begin(term)
            self._entered[request.peer.rank] = (term, request.peer.incarnation)
        all_of_them = self.together.add(("enter", term), request)
        for one in all_of_them or ():
            one.answer({"updates": {str(model): shard.updates for model, (_, shard) in self._shards.items()}})

    def _begin(self, term: int) -> None:
        void = f"term {term} of the run has begun: what was under way is void"
        self.term = term
        self.together.renew(void)
        early, self._early = self._early, {}
        refuse_all([request for waiting in early.values() for request, _ in waiting], PeerLost(void))
        for lock, shard in self._shards.values():
            with lock:
                shard.forget_pushes(PeerLost(void))

    def _settle(self, request: Request) -> None:
        all_of_them = self.together.add(("settle", self.term), request)
        if all_of_them is not None:
            self._carry_out(all_of_them, lambda: self._go_back(all_of_them))

    def _go_back(self, requests: list[Request]) -> None:
        for model, updates in requests[0].head["updates"].items():
            lock, shard = self._shards[int(model)]
            with lock:
                if shard.updates == int(updates) + 1:
                    shard.undo()
                elif shard.updates != int(updates):
                    raise WorldError(
                        f"a server is at update {shard.updates} of model {model}, others at {updates}"
                    )
        for one in requests:
            one.answer()

    # -- apply=worker ----------------------------------------------------------------------------------------------

    def _sum(self, request: Request) -> None:
        head = request.head
        all_of_them = self.together.add(("sum", head["model"], head["number"], head.get("part", 0)), request)
        if all_of_them is not None:
            self._carry_out(all_of_them, lambda: self._add_up(all_of_them))

    def _add_up(self, all_of_them: list[Request]) -> None:
        parts = [r.tensors[0] for r in all_of_them]
        if len({(p.dtype, p.numel()) for p in parts}) > 1:
            told = ", ".join(
                f"worker {r.peer.rank} {p.numel()} of {p.dtype}"
                for r, p in zip(all_of_them, parts, strict=True)
            )
            raise UsageError(f"the workers' parts of one sum differ: {told}")
        self.sums += 1
        total = torch.empty_like(parts[0])
        torch.add(parts[0], parts[1], out=total) if len(parts) > 1 else total.copy_(parts[0])
        for part in parts[2:]:
            total.add_(part)
        for one in all_of_them:
            one.answer({}, [total], None if one.peer.local else _keep(total))

    # -- apply=server ----------------------------------------------------------------------------------------------

    def _open(self, request: Request) -> None:
        model, spec = int(request.head["model"]), [tuple(r) for r in request.head["ranges"]]
        with self._lock:
            if self.together.lost is not None:
                raise self.together.lost
            if request.peer.rank == 0 and model not in self._shards:
                waiting = [*self._early.pop(model, []), (request, spec)]
                try:
                    self._shards[model] = (
                        threading.Lock(),
                        Shard(spec, request.tensors[0], self.num_workers, keeps=self.num_servers > 1),
                    )
                except EchelonError as error:
                    refuse_all([one for one, _ in waiting], error)
                    return
                except SENSELESS as error:
                    refuse_all([one for one, _ in waiting], _senseless(request, error))
                    return
                self._updates[model] = Updates(self._shards[model][1])
            elif model not in self._shards:
                self._early.setdefault(model, []).append((request, spec))
                return
            else:
                waiting = [(request, spec)]
            shard = self._shards[model][1]
        for one, mine in waiting:
            if mine != shard.spec:
                one.refuse(
                    UsageError(f"worker {one.peer.rank} has other parameters in model {model} than worker 0")
                )
            else:
                one.answer({"updates": shard.updates, "held": self.term > 0})

    def _of(self, request: Request) -> tuple[threading.Lock, Shard]:
        return self._shards[int(request.head["model"])]

    def _push(self, request: Request) -> None:
        lock, shard = self._of(request)
        with lock:
            shard.push(request.peer.rank, request.head["push"], request.head["keys"], request)

    def _back(self, request: Request) -> None:
        lock, shard = self._of(request)
        with lock:
            for number in request.head["pushes"]:
                shard.take_back(request.peer.rank, number)
        request.answer()

    def _squares(self, request: Request) -> None:
        lock, shard = self._of(request)
        all_of_them = self._all(request, "squares")
        if all_of_them is not None:
            with lock:
                self._carry_out(all_of_them, lambda: self._tell_squares(shard, all_of_them))

    def _tell_squares(self, shard: Shard, requests: list[Request]) -> None:
        found, finite = shard.squares(requests[0].head["keys"])
        for one in requests:
            one.answer({"squares": found, "finite": finite})

    def _apply(self, request: Request) -> None:
        lock, shard = self._of(request)
        all_of_them = self._all(request, "apply")
        if all_of_them is not None:
            with lock:
                self._carry_out(all_of_them, lambda: self._step(shard, all_of_them))

    def _step(self, shard: Shard, requests: list[Request]) -> None:
        head = requests[0].head
        groups = [(Recipe.from_plain(recipe), float(factor), keys) for recipe, factor, keys in head["groups"]]
        shard.apply(int(head["optimizer"]), groups)
        shard.used([*(key for _, _, keys in groups for key in keys), *head["unused"]])
        self.updates += 1
        for one in requests:
            one.answer({"updates": shard.updates}, [shard.memory])

    def _step_apart(self, request: Request) -> None:
        lock, _ = self._of(request)
        updates = self._updates[int(request.head["model"])]
        number = int(request.head["number"])
        with lock:
            if request.head["alone"]:
                self._carry_out([request], lambda: updates.alone(request))
                self.updates += 1
                return
        all_of_them = self.together.add(("step", request.head["model"], number), request)
        if all_of_them is None:
            return
        differs = check_same(all_of_them)
        if differs is not None:
            refuse_all(all_of_them, differs)
            return
        with lock:
            for due in updates.complete(number, all_of_them):
                self._carry_out(due, partial(updates.carry_out, due))
                self.updates += 1

    def _all(self, request: Request, what: str) -> list[Request] | None:
        """All workers' requests, if they ask for the same."""
        head = request.head
        all_of_them = self.together.add((what, head["model"], head["number"]), request)
        for other in all_of_them[1:] if all_of_them else []:
            first = all_of_them[0].head  # type: ignore[index]
            if other.head != first and repr(other.head) != repr(first):  # a NaN is none's equal
                differs = [k for k in head if repr(other.head.get(k)) != repr(first.get(k))]
                error = UsageError(
                    f"worker {other.peer.rank} steps with another {', '.join(differs)} than worker 0",
                    remedy="Learning rates, parameter groups and clipping must be the same on every worker.",
                )
                refuse_all(all_of_them, error)  # type: ignore[arg-type]
                return None
        return all_of_them

    def _carry_out(self, requests: list[Request], act: Callable[[], None]) -> None:
        try:
            act()
        except EchelonError as error:
            refuse_all(requests, error)
        except SENSELESS as error:
            refuse_all(requests, _senseless(requests[0], error))

    def _values(self, request: Request) -> None:
        lock, shard = self._of(request)
        values = request.tensors[0]
        if values.dtype != torch.uint8 or values.shape != shard.memory.shape:
            raise UsageError(
                f"{request.peer} brought {values.nbytes} bytes of {values.dtype} as values: they are "
                f"{shard.memory.numel()} bytes"
            )
        with lock:
            shard.memory.copy_(values)
        request.answer()

    def _pull(self, request: Request) -> None:
        lock, shard = self._of(request)
        with lock:
            request.answer({"updates": shard.updates}, [shard.memory])

    def _state(self, request: Request) -> None:
        lock, shard = self._of(request)
        with lock:
            told, tensors = shard.state(int(request.head["optimizer"]), request.head["keys"])
            request.answer({"state": told}, tensors)

    def _load(self, request: Request) -> None:
        lock, shard = self._of(request)
        recipes = {key: Recipe.from_plain(plain) for plain, keys in request.head["recipes"] for key in keys}
        with lock:
            shard.load(int(request.head["optimizer"]), recipes, request.head["state"], request.tensors)
        request.answer()


def _senseless(request: Request, error: Exception) -> WireError:
    return WireError(f"{request.verb} of {request.peer} makes no sense: {type(error).__name__} {error}"[:500])


def _keep(*tensors: Tensor) -> Callable[[], Any]:
    """Holds tensors until it is called and let go of."""
    return lambda: tensors and None
