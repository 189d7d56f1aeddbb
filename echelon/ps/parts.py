"""Parts of updates on a server, held until it is told which of them make the next one (backup, aggregate).

part.hold   a worker's part of an update: kept here, answered when it is
part.fold   updates that the first server decided (deciding.py): those that were not made here are made, in order; the values
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echelon import activity
from echelon.errors import UsageError
from echelon.ps.copies import Copies, Copy
from echelon.ps.recipes import Recipe
from echelon.ps.service import Peer, Request
from echelon.ps.session import Training
from echelon.ps.steps import clip_factor, parts_of
from echelon.ps.together import sense

NAME = "part"

Held = tuple[dict[str, Any], dict[int, Tensor]]


class Parts:
    """A service of a host (service.Service)."""

    def __init__(self, training: Training, copies: Copies) -> None:
        self.training, self.copies = training, copies
        self._held: dict[int, dict[tuple[int, int], Held]] = {}
        """Model -> (worker, number) -> what it sent."""

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
        with copy.lock:
            for version, told, lead in request.head["log"]:
                if int(version) == copy.shard.updates:
                    self._update(copy, model, [(int(w), int(n), int(c)) for w, n, c in told], int(lead))
                elif int(version) > copy.shard.updates:
                    raise UsageError(
                        f"{request.peer} told of update {version}, and {copy.shard.updates} is next"
                    )
            request.answer({"updates": copy.shard.updates}, [copy.shard.memory])

    def _update(self, copy: Copy, model: int, told: list[tuple[int, int, int]], lead: int) -> None:
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
        factor = clip_factor(list(sums.values()), float(head["clip_norm"]))
        step = [(recipe, factor, keys) for recipe, keys in groups]
        copy.shard.step(int(head["optimizer"]), step, lambda key, out: sums[key])
        self.training.updates += 1
        newest = copy.shard.updates
        self._held[model] = {k: v for k, v in held.items() if int(v[0]["version"]) >= newest}


def _weighted(parts: list[Tensor], weights: list[float]) -> Tensor:
    if len(parts) == 1 and weights[0] == 1.0:
        return parts[0]
    out = torch.mul(parts[0], weights[0])
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        out.add_(part, alpha=weight)
    return out
