"""Training, as a server offers it: sums for workers that apply them, or the whole optimizer step.

train.sum      every worker's addends of a flat piece; all get the sum                       apply=worker
train.open     the ranges that a server holds of a model; worker 0 brings their values       apply=server
train.push     gradients of some ranges: provisional, answered once they were used or taken back
train.back     takes a push back
train.squares  what every worker's pushes sum up to: squares and whether it is finite
train.apply    every worker's optimizer steps: all get the new values
train.values   worker 0 changed values itself
train.state    the optimizer's state of some ranges
train.load     … and back
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from echelon import activity
from echelon.errors import EchelonError, UsageError, WireError
from echelon.ps.recipes import Recipe
from echelon.ps.service import Peer, Request
from echelon.ps.shard import Shard
from echelon.ps.together import Together, refuse_all

NAME = "train"


class Training:
    """A service of a host (service.Service). One a server; workers come over connections of their own."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.together = Together(num_workers)
        self.updates = self.sums = 0
        self._lock = threading.Lock()
        self._shards: dict[int, tuple[threading.Lock, Shard]] = {}
        self._early: dict[int, list[Request]] = {}
        """Opened by workers before worker 0 brought the values."""
        self._verbs: dict[str, Callable[[Request], None]] = {
            "sum": self._sum,
            "open": self._open,
            "push": self._push,
            "back": self._back,
            "squares": self._squares,
            "apply": self._apply,
            "values": self._values,
            "state": self._state,
            "load": self._load,
        }

    def called(self, request: Request) -> None:
        verb = self._verbs.get(request.verb)
        if verb is None or request.peer.role != "worker":
            raise UsageError(f"{request.peer} called {request.verb}, which servers do not offer it")
        activity.moved()
        try:
            verb(request)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise WireError(
                f"{request.verb} of {request.peer} makes no sense: {type(error).__name__} {error}"
            ) from None

    def gone(self, peer: Peer) -> None:
        if peer.role == "worker":
            self.together.lose(peer.rank, "ended its connection to a parameter server")

    # -- apply=worker ----------------------------------------------------------------------------------------------

    def _sum(self, request: Request) -> None:
        head = request.head
        all_of_them = self.together.add(("sum", head["model"], head["number"], head.get("part", 0)), request)
        if all_of_them is None:
            return
        parts = [r.tensors[0] for r in all_of_them]
        if len({(p.dtype, p.numel()) for p in parts}) > 1:
            told = ", ".join(
                f"worker {r.peer.rank} {p.numel()} of {p.dtype}"
                for r, p in zip(all_of_them, parts, strict=True)
            )
            refuse_all(all_of_them, UsageError(f"the workers' parts of one sum differ: {told}"))
            return
        self.sums += 1
        total = torch.empty_like(parts[0])
        torch.add(parts[0], parts[1], out=total) if len(parts) > 1 else total.copy_(parts[0])
        for part in parts[2:]:
            total.add_(part)
        for one in all_of_them:
            one.answer({}, [total], None if one.peer.local else _keep(total))

    # -- apply=server ----------------------------------------------------------------------------------------------

    def _open(self, request: Request) -> None:
        model, ranges = int(request.head["model"]), request.head["ranges"]
        with self._lock:
            if request.peer.rank == 0:
                try:
                    shard = Shard(ranges, request.tensors[0], self.num_workers)
                except EchelonError as error:
                    refuse_all([*self._early.pop(model, []), request], error)
                    return
                self._shards[model] = (threading.Lock(), shard)
                waiting = [*self._early.pop(model, []), request]
            elif model not in self._shards:
                self._early.setdefault(model, []).append(request)
                return
            else:
                waiting = [request]
            shard = self._shards[model][1]
        for one in waiting:
            if [tuple(r) for r in one.head["ranges"]] != shard.spec:
                one.refuse(
                    UsageError(f"worker {one.peer.rank} has other parameters in model {model} than worker 0")
                )
            else:
                one.answer({"updates": shard.updates})

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

    def _all(self, request: Request, what: str) -> list[Request] | None:
        """All workers' requests, if they ask for the same."""
        head = request.head
        all_of_them = self.together.add((what, head["model"], head["number"]), request)
        for other in all_of_them[1:] if all_of_them else []:
            if other.head != all_of_them[0].head:  # type: ignore[index]
                differs = [k for k in head if other.head.get(k) != all_of_them[0].head.get(k)]  # type: ignore[index]
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

    def _values(self, request: Request) -> None:
        lock, shard = self._of(request)
        with lock:
            shard.memory.copy_(request.tensors[0])
        request.answer()

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


def _keep(*tensors: Tensor) -> Callable[[], Any]:
    """Holds tensors until it is called and let go of."""
    return lambda: tensors and None
