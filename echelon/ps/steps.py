"""Whole steps on a server, where workers need not be at the same place: bounded staleness, and none at all (async).

A call brings a worker's part of one update, and its answer are the values after that update. Update s happens when every
worker's part of it is here, in the order of s; a worker may send parts of later updates meanwhile. The parts are summed in
the order of ranks, so that without staleness every bit is that of sync. Under async every part is an update by itself, in the
order in which they come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.errors import UsageError, WireError
from echelon.native import update
from echelon.ps.decisions import Delayed
from echelon.ps.eager import lr_factor
from echelon.ps.recipes import Recipe
from echelon.ps.service import Request
from echelon.ps.shard import Shard
from echelon.ps.staleness import Staleness
from echelon.verdict import to_plain

Step = Callable[
    [int, Sequence[tuple[Recipe, float, Sequence[int]]], Callable[[int, Tensor | None], Tensor]], None
]
"""Makes the update (Shard.step): optimizer, groups, the gradient of a key."""

KEPT_EPOCHS = 8
"""Of which a server remembers the pieces; one epoch of each loader is open at a time."""


@dataclass(frozen=True)
class Decided:
    """About one update, before it is made: how far it is clipped (None: this server alone knows), and whether nobody makes it."""

    factor: float | None = None
    skips: bool = False
    whose: tuple[tuple[int, int], ...] = ()

    def plain(self, rule: str) -> dict[str, object]:
        """What workers are told of an update that is not made."""
        return {"not_finite": rule, "whose": to_plain(self.whose)}


class Counted:
    """Which pieces are in updates of a model here. A piece is dealt again when the worker that had it is gone, and its part may
    have reached some servers and not others: each server takes a piece from one worker only, so all have it once."""

    def __init__(self) -> None:
        self._by: dict[tuple[int, int], dict[int, int]] = {}
        """(Loader, epoch) -> piece -> the worker that it was taken from; of the last few epochs."""

    def first(self, worker: int, pieces: Sequence[Sequence[int]]) -> bool:
        """Notes them as this worker's. False when all of them were taken from another: the part does not count."""
        news = not pieces
        for feed, epoch, number in pieces:
            known = self._by.setdefault((int(feed), int(epoch)), {})
            news = known.setdefault(int(number), worker) == worker or news
        for old in list(self._by)[:-KEPT_EPOCHS]:
            del self._by[old]
        return news


class Updates:
    """The updates of one shard. `carry_out` is called with the shard's lock held."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.ready: dict[int, list[Request]] = {}
        """Updates of which all parts are here, and which come after one that is not."""
        self.next = 1
        self.staleness = Staleness()
        self.stop = False
        """Somebody was asked to stop: every answer says so from then on."""
        self.counted = Counted()
        self.decided: dict[tuple[int, int], Decided] = {}
        """Update, as named() has it -> what was decided about it before it is made (looking.py)."""
        self.skipped = 0
        """Updates that moved nothing: their gradients were not finite."""
        self.then: dict[int, Tensor] = {}
        """Worker -> the values that it computes on, where its gradients are compensated for their delay: one more copy of this
        server's ranges for each worker."""

    def complete(self, number: int, requests: list[Request]) -> list[list[Request]]:
        """All parts of update `number` are here: which updates happen now, in order."""
        self.ready[number] = requests
        found = []
        while self.next in self.ready:
            found.append(self.ready.pop(self.next))
            self.next += 1
        return found

    def alone(self, request: Request, step: Step) -> None:
        """One worker's part is an update, unless another's of the same pieces was one. Answers it."""
        if self.counted.first(request.peer.rank, request.head.get("pieces", ())):
            late = max(0, self.shard.updates - int(request.head["version"]))
            divided, strength = (
                bool(request.head.get("divided")),
                float(request.head.get("compensation", 0.0)),
            )
            self.carry_out([request], step, Delayed(late, lr_factor(late) if divided else 1.0, strength))
            if strength:
                self.then[request.peer.rank] = self.shard.memory.clone()
            return
        self.decided.pop(named([request]), None)
        self.stop = self.stop or bool(request.head["stop"])
        request.answer({"updates": self.shard.updates, "stop": self.stop}, [self.shard.memory])

    def sent(self, worker: int) -> None:
        """A worker took the values as they are now."""
        if worker in self.then:
            self.then[worker] = self.shard.memory.clone()

    def carry_out(self, requests: list[Request], step: Step, rule: Delayed | None = None) -> None:
        """One update from these parts, in the order in which they are given; by `rule` where one may be late. Answers them."""
        shard, head = self.shard, requests[0].head
        decided = self.decided.pop(named(requests), Decided())
        if decided.skips:
            self._pass_over(requests, step, decided)
            return
        parts = [parts_of(shard, request) for request in requests]
        used = {int(key) for request in requests for key in request.head["used"]}
        self.stop = self.stop or any(bool(request.head["stop"]) for request in requests)
        groups = [
            (_slowed(Recipe.from_plain(recipe), rule), [k for k in keys if k in used])
            for recipe, keys in head["groups"]
        ]
        if rule is not None and rule.compensation and requests[0].peer.rank in self.then:
            then = self.shard.views(self.then[requests[0].peer.rank])
            parts = [
                {k: _compensated(g, shard.values[k], then[k], rule.compensation) for k, g in parts[0].items()}
            ]
        sums = {key: added([p[key] for p in parts]) for _, keys in groups for key in keys}
        factor = decided.factor
        if factor is None:
            factor = clip_factor(list(sums.values()), float(head["clip_norm"]))
        self._count(requests)
        step(int(head["optimizer"]), [(r, factor, keys) for r, keys in groups], lambda key, out: sums[key])
        for request in requests:
            request.answer({"updates": shard.updates, "stop": self.stop}, [shard.memory])

    def _pass_over(self, requests: list[Request], step: Step, decided: Decided) -> None:
        """An update that nobody makes: the version moves on, so that nobody waits for it, and nothing else does."""
        self.stop = self.stop or any(bool(request.head["stop"]) for request in requests)
        self._count(requests)
        step(int(requests[0].head["optimizer"]), [], lambda key, out: self.shard.values[key])
        self.skipped += 1
        told = {"updates": self.shard.updates, "stop": self.stop, **decided.plain("skip")}
        for request in requests:
            request.answer(told, [self.shard.memory])

    def _count(self, requests: list[Request]) -> None:
        for request in requests:
            self.staleness.add(max(0, self.shard.updates - int(request.head["version"])))


def _slowed(recipe: Recipe, rule: Delayed | None) -> Recipe:
    if rule is None or rule.lr_factor == 1.0:
        return recipe
    return recipe.with_numbers({"lr": recipe.numbers["lr"] * rule.lr_factor})


def _compensated(gradient: Tensor, now: Tensor, then: Tensor, strength: float) -> Tensor:
    """DC-ASGD (Zheng et al. 2017): what the gradient would be now, its second derivative taken as its square."""
    return torch.addcmul(gradient, gradient * gradient, now - then, value=strength)


def parts_of(shard: Shard, request: Request) -> dict[int, Tensor]:
    return parts_from(shard, request.head["keys"], request)


def parts_from(shard: Shard, keys: Sequence[Sequence[int]], request: Request) -> dict[int, Tensor]:
    """The gradients of these runs of keys, which a request brought."""
    if len(keys) != len(request.tensors):
        raise WireError(f"{request.peer} sent {len(request.tensors)} tensors for {len(keys)} runs of keys")
    found: dict[int, Tensor] = {}
    for run, tensor in zip(keys, request.tensors, strict=True):
        found |= shard.split(run, tensor, str(request.peer))
    return found


def added(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    out = torch.add(parts[0], parts[1])
    for part in parts[2:]:
        out.add_(part)
    return out


def named(requests: list[Request]) -> tuple[int, int]:
    """The update that these are the parts of: the worker whose it is alone, or -1, and its number."""
    first = requests[0]
    return (first.peer.rank if first.head.get("alone") else -1), int(first.head.get("number", 0))


def clip_factor(sums: Sequence[Tensor], clip_norm: float) -> float:
    """As torch.nn.utils.clip_grad_norm_, over what this server holds: everything, or others were asked (judge.py)."""
    if clip_norm <= 0:
        return 1.0
    return factor_of(math.fsum(update.sum_of_squares(x) for x in sums), clip_norm)


def factor_of(squares: float, clip_norm: float) -> float:
    factor = clip_norm / (math.sqrt(squares) + 1e-6)
    return 1.0 if factor > 1.0 else factor


def check_same(requests: list[Request]) -> None:
    """Do all workers step by the same numbers? Raises UsageError if not."""
    first = requests[0]
    for other in requests[1:]:
        for name in ("optimizer", "groups", "clip_norm"):
            if other.head[name] != first.head[name]:
                raise UsageError(
                    f"worker {other.peer.rank} steps with another {name} than worker {first.peer.rank}",
                    remedy="Learning rates, parameter groups and clipping must be the same on every worker.",
                )
