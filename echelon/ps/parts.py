"""Parts of updates on a server, held until it is told which of them make the next one (backup, aggregate).

part.hold   a worker's part of an update: kept here, answered when it is
part.fold   updates that the first server decided (deciding.py): those that were not made here are made, in order; the values
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

KEPT = 256

Held = tuple[dict[str, Any], dict[int, Tensor]]


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
        self._held: dict[int, dict[tuple[int, int], Held]] = {}
        """Model -> (worker, number) -> what it sent."""
        self._not_made: dict[tuple[int, int], dict[str, object]] = {}
        """(Model, version) of the last updates that moved nothing -> what workers are told."""

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
                mine = {key: x.clone() for key, x in parts_of(copy.shard, request).items()}
                of_model = self._held.setdefault(int(head["model"]), {})
                of_model[request.peer.rank, int(head["number"])] = (dict(head), mine)
        request.answer()

    def _fold(self, request: Request) -> None:
        copy, model = self.copies.of(request), int(request.head["model"])
        not_made: list[list[Any]] = []
        for version, told, lead in request.head["log"]:
            entry = int(version), [(int(w), int(n), int(c)) for w, n, c in told], int(lead)
            if self._once(copy, model, request, *entry):
                request.answer({"updates": 0, "not_made": [*not_made, self._told(model, entry[0], entry[2])]})
                return
            if (model, entry[0]) in self._not_made:
                not_made.append(self._told(model, entry[0], entry[2]))
        with copy.lock:
            request.answer({"updates": copy.shard.updates, "not_made": not_made}, [copy.shard.memory])

    def _told(self, model: int, version: int, lead: int) -> list[Any]:
        return [version, lead, self._not_made[model, version]]

    def _once(
        self, copy: Copy, model: int, request: Request, version: int, told: list[tuple[int, int, int]], lead: int
    ) -> bool:  # fmt: skip
        """Makes one update, unless it was made; True if it was refused. Where it is looked at first, no lock is held meanwhile: servers wait for
        each other, and for whoever tells them of it."""
        with copy.lock:
            if version < copy.shard.updates:
                return False
            if version > copy.shard.updates:
                raise UsageError(f"{request.peer} told of update {version}, and {copy.shard.updates} is next")
            made = self._make(copy, model, told, lead)
            if made.decided is not None:
                self._update(copy, model, made, made.decided)
                return False
        name, count = (JUDGED, version), self.copies.num_servers
        about = self.copies.shard_of(request), model, name
        whole = looking.over_all(self.training.reporter, count, *about, made.summary)
        decided, refused = looking.decided(whole, made.rule, made.clip_norm)
        with copy.lock:
            if decided.skips:
                self._not_made[model, version] = decided.plain("skip" if refused is None else "refuse")
                for old in list(self._not_made)[:-KEPT]:
                    del self._not_made[old]
            if refused is None and version == copy.shard.updates:
                self._update(copy, model, made, decided)
        return refused is not None

    def _make(self, copy: Copy, model: int, told: list[tuple[int, int, int]], lead: int) -> Made:
        """The mean of these parts, in the order of ranks, weighted by samples."""
        held = self._held.get(model, {})
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

    def _update(self, copy: Copy, model: int, made: Made, decided: Decided) -> None:
        """Nothing moves but the version if nobody makes it."""
        factor = 1.0 if decided.factor is None else decided.factor
        step = [] if decided.skips else [(recipe, factor, keys) for recipe, keys in made.groups]
        copy.shard.step(made.optimizer, step, lambda key, out: made.sums[key])
        copy.updates.skipped += decided.skips
        self.training.updates += 1
        newest, held = copy.shard.updates, self._held.get(model, {})
        self._held[model] = {k: v for k, v in held.items() if int(v[0]["version"]) >= newest}


def _weighted(parts: list[Tensor], weights: list[float]) -> Tensor:
    if len(parts) == 1 and weights[0] == 1.0:
        return parts[0]
    out = torch.mul(parts[0], weights[0])
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        out.add_(part, alpha=weight)
    return out
