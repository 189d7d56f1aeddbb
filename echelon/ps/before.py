"""The version that a server's ranges can go back to, beside the one that counts.

Usually that is the one before the last update. Where several updates make one iteration of a script (a GAN's), updates name the
iteration, and it is the one before the first of them: all of them are undone, or none. Not for two threads at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.errors import UsageError
from echelon.ps.optimizers import Range
from echelon.ps.recipes import Recipe

DTYPES = {"float32": torch.float32, "float64": torch.float64}
Ranges = dict[tuple[int, int], Range]
"""(Optimizer, key) -> values and that optimizer's state."""


class Before:
    """In memory of its own, which takes turns with the other one: what an iteration's first update writes is written beside, at no more
    memory traffic. Its further updates are made in place, and the state that they change is copied first."""

    def __init__(self, memory: Tensor, spec: Sequence[Sequence[Any]]) -> None:
        self.memory, self.values = memory, views(spec, memory)
        self.spare: Ranges = {}
        self.last: tuple[tuple[int, int], ...] | None = None
        """What changed since, by optimizer and key; None when there is nothing to go back to."""
        self.since: int | None = None
        """The iteration that this is the beginning of, where updates say so."""
        self.updates = 0
        """How many were made since."""

    def opens(self, since: int | None) -> bool:
        """Is an update of this iteration its first? One that names none is one by itself."""
        return since is None or since != self.since

    def room(self, optimizer: int, key: int, recipe: Recipe) -> Range:
        """Where an iteration's first update writes."""
        found = self.spare.get((optimizer, key))
        if found is None:
            return Range(recipe, self.values[key])
        found.param = self.values[key]
        return found

    def opened(self, since: int | None, stepped: Ranges, ranges: Ranges) -> None:
        """The first update is made: of what `stepped`, the version before is in `ranges`."""
        self.spare.update({at: ranges[at] for at in stepped})
        self.last, self.since, self.updates = tuple(stepped), since, 1

    def save(self, at: tuple[int, int], held: Range) -> None:
        """A further update of the iteration is about to change this state; its values are here already."""
        if self.last is None or at in self.last:
            return
        kept = self.spare.setdefault(at, Range(held.recipe, self.values[at[1]]))
        rooms = kept.arrays
        kept.arrays = {
            name: rooms[name].copy_(x) if name in rooms else x.clone() for name, x in held.arrays.items()
        }
        kept.recipe, kept.step = held.recipe, held.step
        self.last = (*self.last, at)

    def put_back(self, ranges: Ranges) -> int:
        """What counted becomes what is kept; how many updates that undoes. The caller lets memories take turns."""
        if self.last is None:
            raise UsageError("the version before the last update is not kept here")
        for at in self.last:
            ranges[at], self.spare[at] = self.spare[at], ranges[at]
        undone, self.updates, self.last, self.since = self.updates, 0, None, None
        return undone

    # -- for a copy on another server ------------------------------------------------------------------------------

    def snapshot(self) -> tuple[dict[str, Any], list[Tensor]] | None:
        """What a copy needs to be able to undo an iteration as well; None when none is under way."""
        if self.since is None:
            return None
        head = {"since": self.since, "updates": self.updates}
        if self.last is None:  # nor can the copy
            return head, []
        told, tensors = told_of({at: self.spare[at] for at in self.last})
        return {**head, "states": told}, [self.memory, *tensors]

    def restore(self, head: dict[str, Any], tensors: Iterator[Tensor]) -> None:
        """What snapshot() gave; copies it."""
        self.since, self.updates = int(head["since"]), int(head["updates"])
        if "states" in head:
            self.memory.copy_(next(tensors))
            found = untold(head["states"], tensors, self.values)
            self.spare.update(found)
            self.last = tuple(found)


def views(spec: Sequence[Sequence[Any]], memory: Tensor) -> dict[int, Tensor]:
    """By key: its range of this memory."""
    found = {}
    for key, offset, numel, dtype in spec:
        kind = DTYPES.get(dtype)
        there = kind is not None and offset >= 0 and not offset % 64 and numel >= 0
        if kind is None or not there or offset + numel * kind.itemsize > memory.numel():
            raise UsageError(f"range {key} of {numel} {dtype} at byte {offset} cannot be held here")
        found[key] = memory[offset : offset + numel * kind.itemsize].view(kind)
    return found


def told_of(ranges: Ranges) -> tuple[list[list[Any]], list[Tensor]]:
    """Optimizers' state: [optimizer, key, recipe, steps, names], and the arrays of those names."""
    told: list[list[Any]] = []
    tensors: list[Tensor] = []
    for (optimizer, key), held in ranges.items():
        told.append([optimizer, key, held.recipe.to_plain(), held.step, list(held.arrays)])
        tensors += held.arrays.values()
    return told, tensors


def untold(told: Sequence[Sequence[Any]], tensors: Iterator[Tensor], values: dict[int, Tensor]) -> Ranges:
    """What told_of() gave, over these values; copies the arrays."""
    found: Ranges = {}
    for optimizer, key, recipe, steps, names in told:
        held = found[optimizer, key] = Range(Recipe.from_plain(recipe), values[key])
        held.arrays = {name: next(tensors).clone() for name in names}
        held.step = int(steps)
    return found
