"""Parts of updates on a server, held until it is told which of them make the next one (backup, aggregate).

part.hold   a worker's part of an update: kept here, and where this shard has a copy; answered when it is
part.fold   updates that the first server decided (deciding.py): those that were not made here are made, in order; the values

So a server that takes over has every part that an update may be decided about, whatever became of the worker that sent it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from echelon import activity
from echelon.errors import UsageError
from echelon.ps import looking
from echelon.ps.copies import Copies, Copy
from echelon.ps.judge import Summary
from echelon.ps.recipes import Recipe
from echelon.ps.service import Peer, Request
from echelon.ps.session import Training
from echelon.ps.steps import Decided, clip_factor, parts_of
from echelon.ps.together import sense
from echelon.verdict import Rule

NAME = "part"

JUDGED = -2
"""In place of a worker, in the name of an update that is judged."""


@dataclass
class Made:
    """An update, summed and not yet made."""

    optimizer: int
    groups: list[tuple[Recipe, list[int]]]
    sums: dict[int, Tensor]
    rule: Rule
    clip_norm: float
    summary: Summary = field(default_factory=lambda: Summary([]))
    decided: Decided | None = None


class Parts:
    """A service of a host (service.Service)."""

    def __init__(self, training: Training, copies: Copies) -> None:
        self.training, self.copies = training, copies

    def called(self, request: Request) -> None:
        activity.moved()
        if request.peer.role != "worker" or request.verb not in ("hold", "fold"):
            raise UsageError(f"{request.peer} called {request.verb}, which servers do not offer it")
        with sense(request):
            self._hold(request) if request.verb == "hold" else self._fold(request)

    def gone(self, peer: Peer) -> None:
        pass  # what it sent may still count

    def _hold(self, request: Request) -> None:
        copy, head = self.copies.of(request), request.head
        with copy.lock:
            if int(head["version"]) >= copy.shard.updates:  # else it is too late for its update
                copy.hold(request.peer.rank, head, parts_of(copy.shard, request))
                about = {"worker": request.peer.rank, "part": head}
                self._mirrored(request, "hold", about, *request.tensors)
        request.answer()

    def _mirrored(self, request: Request, verb: str, head: dict[str, Any], *tensors: Tensor) -> None:
        mirror = self.training.mirrors.get(self.copies.shard_of(request))
        if mirror is not None:
            mirror.tell(verb, int(request.head["model"]), head, tensors)

    def _fold(self, request: Request) -> None:
        copy = self.copies.of(request)
        not_made: list[list[Any]] = []
        for version, told, lead in request.head["log"]:
            entry = int(version), [(int(w), int(n), int(c)) for w, n, c in told], int(lead)
            refused = self._once(copy, request, *entry)
            if entry[0] in copy.not_made:
                not_made.append([entry[0], entry[2], copy.not_made[entry[0]]])
            if refused:
                request.answer({"updates": 0, "not_made": not_made})
                return
        with copy.lock:
            request.answer({"updates": copy.shard.updates, "not_made": not_made}, [copy.shard.memory])

    def _once(
        self, copy: Copy, request: Request, version: int, told: list[tuple[int, int, int]], lead: int
    ) -> bool:
        """Makes one update, unless it was made; True if it was refused. Where it is looked at first, no lock is held meanwhile: servers wait for
        each other, and for whoever tells them of it."""
        with copy.lock:
            if version < copy.shard.updates:
                return False
            if version > copy.shard.updates:
                raise UsageError(f"{request.peer} told of update {version}, and {copy.shard.updates} is next")
            made = self._make(copy, told, lead)
            if made.decided is not None:
                self._update(copy, request, made, made.decided)
                return False
        name, count = (JUDGED, version), self.copies.num_servers
        about = self.copies.shard_of(request), int(request.head["model"]), name
        whole = looking.over_all(self.training.reporter, count, *about, made.summary)
        decided, refused = looking.decided(whole, made.rule, made.clip_norm)
        with copy.lock:
            if decided.skips:
                why = decided.plain("skip" if refused is None else "refuse")
                copy.passed_over(version, why)
                self._mirrored(request, "pass", {"version": version, "told": why})
            if refused is None and version == copy.shard.updates:
                self._update(copy, request, made, decided)
        return refused is not None

    def _make(self, copy: Copy, told: list[tuple[int, int, int]], lead: int) -> Made:
        """The mean of these parts, in the order of ranks, weighted by samples."""
        held = copy.held
        found = [(*held[worker, number], count) for worker, number, count in told]
        head = next(held[worker, number][0] for worker, number, _ in told if worker == lead)
        total = sum(count for _, _, count in found) or 1
        used = {int(key) for mine, _, _ in found for key in mine["used"]}
        groups = [
            (Recipe.from_plain(recipe), [k for k in keys if k in used]) for recipe, keys in head["groups"]
        ]
        weights = [count / total if head["mean"] else 1.0 for _, _, count in found]
        sums = {
            key: _weighted([parts[key] for _, parts, _ in found], weights)
            for _, keys in groups
            for key in keys
        }
        clip_norm, rule = float(head["clip_norm"]), looking.RULES[str(head.get("nonfinite", "pass"))]
        made = Made(int(head["optimizer"]), groups, sums, rule, clip_norm)
        if not looking.needed(clip_norm, rule, self.copies.num_servers):
            made.decided = Decided(clip_factor(list(sums.values()), clip_norm))
        else:
            parts_by_worker = {told[i][0]: parts for i, (_, parts, _) in enumerate(found)}
            made.summary = looking.summed(sums, parts_by_worker)
        return made

    def _update(self, copy: Copy, request: Request, made: Made, decided: Decided) -> None:
        """Here and on the partner. Nothing moves but the version if nobody makes it."""
        factor = 1.0 if decided.factor is None else decided.factor
        step = [] if decided.skips else [(recipe, factor, keys) for recipe, keys in made.groups]
        mirror = self.training.mirrors.get(self.copies.shard_of(request))
        if mirror is None:
            copy.shard.step(made.optimizer, step, lambda key, out: made.sums[key])
        else:
            model, following = int(request.head["model"]), copy.updates.next
            mirror.update(model, copy, {}, following, made.optimizer, step, lambda key, out: made.sums[key])
        copy.updates.skipped += decided.skips
        self.training.updates += 1
        copy.let_go()


def _weighted(parts: list[Tensor], weights: list[float]) -> Tensor:
    if len(parts) == 1 and weights[0] == 1.0:
        return parts[0]
    out = torch.mul(parts[0], weights[0])
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        out.add_(part, alpha=weight)
    return out
