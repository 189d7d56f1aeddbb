"""What one server holds of one model: flat ranges in one memory, their optimizers' state, and what was pushed for them.

A push is provisional: it counts when its optimizer steps, and can be taken back until then. Sums are taken in the order of
ranks. Where other servers hold the rest of the model, the version before the last update stays beside it, so that an update
that did not happen everywhere can be undone; and that before an iteration's first one, where several make an iteration
(before.py). Not for two threads at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from echelon.errors import EchelonError, UsageError, WireError
from echelon.native import spread, update
from echelon.ps.before import Before, told_of, untold, views
from echelon.ps.optimizers import Range
from echelon.ps.recipes import Recipe
from echelon.ps.service import Request

Gradient = Callable[[int, Tensor | None], Tensor | Sequence[Tensor]]
"""Key, and memory that may be used for it -> its gradient, or the parts whose sum it is, in this order."""


@dataclass
class Push:
    """What one worker pushed in one call; the request is answered when nothing of it is needed any more."""

    request: Request
    left: set[int]


@dataclass
class Arrived:
    """What one worker pushed since its last step."""

    parts: dict[int, Tensor] = field(default_factory=dict)
    """Key -> its gradient, in the worker's memory or in what was received."""
    pushes: dict[int, Push] = field(default_factory=dict)
    by_key: dict[int, int] = field(default_factory=dict)


class Shard:
    """`ranges` are [key, offset in bytes, elements, type]. The memory starts with rank 0's values."""

    def __init__(
        self, ranges: Sequence[Sequence[Any]], memory: Tensor, num_workers: int, keeps: bool = False
    ) -> None:
        self.spec = [tuple(r) for r in ranges]
        self.memory = memory.clone()
        self.values = views(self.spec, self.memory)
        self.offsets = {int(key): int(offset) for key, offset, _, _ in self.spec}
        self.before = Before(torch.zeros_like(memory), self.spec) if keeps else None
        self.arrived = [Arrived() for _ in range(num_workers)]
        self.ranges: dict[tuple[int, int], Range] = {}
        """(Optimizer, key) -> values and that optimizer's state: two that step one parameter do not share it."""
        self.sums: dict[int, Tensor] = {}
        """Of keys whose parts were summed before their step: somebody asked for their norm."""
        self.updates = 0
        self._scratch: dict[torch.dtype, Tensor] = {}

    def views(self, memory: Tensor) -> dict[int, Tensor]:
        """The ranges in another memory that is laid out like this one."""
        return views(self.spec, memory)

    # -- what workers push -----------------------------------------------------------------------------------------

    def push(
        self,
        rank: int,
        number: int,
        keys: Sequence[Sequence[int]],
        request: Request,
        used: Sequence[int] = (),
    ) -> None:
        """Each tensor of the request is the gradients of some keys, one behind the other. Those of `used` count no more: it comes a
        second time, and they were used the first time."""
        mine = self.arrived[rank]
        if number in mine.pushes or len(keys) != len(request.tensors):
            raise WireError(
                f"push {number} of worker {rank} has {len(request.tensors)} tensors for {len(keys)} keys"
            )
        found: dict[int, Tensor] = {}
        for run, tensor in zip(keys, request.tensors, strict=True):
            for key, part in self.split(run, tensor, f"worker {rank}").items():
                if key in mine.parts or key in found:
                    raise UsageError(f"worker {rank} pushed range {key} twice in one step")
                found[key] = part
        for key in used:
            found.pop(key, None)
        if not found:
            request.answer()
            return
        mine.parts.update(found)  # all of it, or nothing
        mine.by_key.update(dict.fromkeys(found, number))
        mine.pushes[number] = Push(request, set(found))

    def split(self, keys: Sequence[int], tensor: Tensor, whose: str) -> dict[int, Tensor]:
        """The gradients of these keys, which lie in `tensor` one behind the other."""
        found: dict[int, Tensor] = {}
        at, flat = 0, tensor.view(-1)
        for key in keys:
            value = self.values.get(key)
            if value is None or value.dtype != tensor.dtype or at + value.numel() > tensor.numel():
                raise UsageError(
                    f"{whose} pushed {tensor.numel()} {tensor.dtype} for range {key}, which is "
                    + (f"{value.numel()} of {value.dtype}" if value is not None else "not held here"),
                )
            if key in found:
                raise UsageError(f"{whose} pushed range {key} twice in one step")
            found[key] = flat[at : at + value.numel()]
            at += value.numel()
        if at != tensor.numel():
            raise UsageError(f"{whose} pushed {tensor.numel()} elements for ranges of {at}")
        return found

    def take_back(self, rank: int, number: int) -> None:
        """What was pushed in this call and has not been used does not count."""
        mine = self.arrived[rank]
        push = mine.pushes.get(number)
        if push is not None:
            for key in list(push.left):
                self._used(rank, key)

    def _used(self, rank: int, key: int) -> None:
        mine = self.arrived[rank]
        number = mine.by_key.pop(key)
        del mine.parts[key]
        self.sums.pop(key, None)
        push = mine.pushes[number]
        push.left.discard(key)
        if not push.left:
            del mine.pushes[number]
            push.request.answer()

    # -- what they ask for together --------------------------------------------------------------------------------

    def parts(self, key: int, _: Tensor | None = None) -> Sequence[Tensor]:
        """All workers' parts, in the order of ranks; their sum, if somebody asked for it before. Not copies."""
        if key in self.sums:
            return [self.sums[key]]
        self._complete(key)
        return [mine.parts[key] for mine in self.arrived]

    def total(self, key: int, out: Tensor | None = None) -> Tensor:
        """Their sum; in `out`, if it was not there before. Else it belongs to the shard until the next call."""
        parts = self.parts(key)
        if len(parts) == 1:
            return parts[0]
        out = self._room(parts[0]) if out is None else out
        spread.add([out], parts)
        return out

    def _complete(self, key: int) -> None:
        missing = [rank for rank, mine in enumerate(self.arrived) if key not in mine.parts]
        if missing and key not in self.sums:
            raise UsageError(
                f"range {key} steps, and worker {', '.join(map(str, missing))} has pushed nothing for it"
            )

    def _room(self, like: Tensor) -> Tensor:
        have = self._scratch.get(like.dtype)
        if have is None or have.numel() < like.numel():
            have = self._scratch[like.dtype] = torch.empty(like.numel(), dtype=like.dtype)
        return have[: like.numel()]

    def squares(self, keys: Sequence[int]) -> tuple[list[float], bool]:
        """Sums of squares of the summed gradients, one a key, and whether all are finite."""
        found, finite = [], True
        for key in keys:
            if key not in self.sums:
                total = self.total(key)
                self.sums[key] = total if len(self.arrived) == 1 else total.clone()
            found.append(update.sum_of_squares(self.sums[key]))
            finite = finite and (math.isfinite(found[-1]) or update.finite(self.sums[key]))
        return found, finite

    def broken(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """Which workers' parts of these keys are not finite: (worker, key); worker -1 where only their sum is not."""
        found = []
        for key in keys:
            parts = [(rank, mine.parts[key]) for rank, mine in enumerate(self.arrived) if key in mine.parts]
            wrong = [(rank, key) for rank, part in parts if not update.finite(part)]
            found += wrong or [(-1, key)] * (not update.finite(self.total(key)))
        return found

    def check(self, keys: Iterable[int]) -> None:
        """Is everything there that a step of these needs?"""
        for key in keys:
            self._complete(key)

    def step(
        self,
        optimizer: int,
        groups: Sequence[tuple[Recipe, float, Sequence[int]]],
        gradient: Gradient,
        into: Sequence[Tensor] = (),
        since: int | None = None,
    ) -> None:
        """One update: of each group on its keys, with the group's factor times the gradient. One that fails leaves everything as it was, if
        the version before is kept and it is its iteration's first. `into` are memories like this one, as bytes: they have all values once it
        is done. `since` names the iteration of which it is a part, if undo() is to go back to where that began."""
        if since is not None and self.before is None:
            self.before = Before(torch.zeros_like(self.memory), self.spec)
        before, stepped, keys_now = self.before, {}, set()
        opens = before is not None and before.opens(since)
        for recipe, factor, keys in groups:
            for key in keys:
                held, after = self._range(optimizer, key, recipe), None
                if before is not None and opens:
                    after = stepped[optimizer, key] = before.room(optimizer, key, recipe)
                elif before is not None:
                    before.save((optimizer, key), held)
                copies = [(memory, self.offsets[key]) for memory in into]
                held.apply(gradient(key, None), scale=factor, numbers=recipe, out=after, copies=copies)
                keys_now.add(key)
        if before is not None and opens:
            self._turn(before, stepped, since)
        elif before is not None:
            before.updates += 1
        self._fill(into, [key for key in self.values if key not in keys_now])
        self.updates += 1

    def _fill(self, into: Sequence[Tensor], keys: Sequence[int]) -> None:
        for key in keys if into else ():
            value, at = self.values[key], self.offsets[key]
            for memory in into:
                spread.copy(memory[at : at + value.nbytes], value)

    def _turn(self, before: Before, stepped: dict[tuple[int, int], Range], since: int | None) -> None:
        """What was written beside is the version that counts now, and the other way round."""
        keys = {key for _, key in stepped}
        for key, value in self.values.items():
            if key not in keys:
                before.values[key].copy_(value)
        before.opened(since, stepped, self.ranges)
        self.ranges.update(stepped)
        self._swap(before)

    def _swap(self, before: Before) -> None:
        self.memory, before.memory = before.memory, self.memory
        self.values, before.values = before.values, self.values
        for (_, key), held in self.ranges.items():
            held.param = self.values[key]

    def undo(self) -> None:
        """The last update did not happen, nor did others of its iteration, if it named one."""
        before = self.before
        if before is None:
            raise UsageError("the version before the last update is not kept here")
        self.updates -= before.put_back(self.ranges)
        self._swap(before)

    @property
    def open(self) -> tuple[int, int] | None:
        """The iteration that can be undone, and how many updates it has so far; None where updates name none."""
        before = self.before
        return (before.since, before.updates) if before is not None and before.since is not None else None

    def forget_pushes(self, error: EchelonError) -> None:
        """What was pushed and not used is void: whoever pushed it is told why."""
        for mine in self.arrived:
            pushes, mine.pushes = mine.pushes, {}
            mine.parts, mine.by_key = {}, {}
            for push in pushes.values():
                push.request.refuse(error)
        self.sums = {}

    def _range(self, optimizer: int, key: int, recipe: Recipe) -> Range:
        held = self.ranges.get((optimizer, key))
        if held is None:
            held = self.ranges[optimizer, key] = Range(recipe, self.values[key])
        return held

    def used(self, keys: Sequence[int], only: int | None = None) -> None:
        """What was pushed for these keys has been used, or is not wanted: it may go. `only` one worker's, if named."""
        for rank, mine in enumerate(self.arrived):
            for key in keys if only in (None, rank) else ():
                if key in mine.parts:
                    self._used(rank, key)

    def overwrite(self, values: Tensor, whose: str) -> None:
        """All values, as bytes. What undo() goes back to stays as it is."""
        if values.dtype != torch.uint8 or values.shape != self.memory.shape:
            raise UsageError(
                f"{whose} brought {values.nbytes} bytes of {values.dtype} as values: they are {self.memory.numel()} bytes"
            )
        self.memory.copy_(values)

    # -- state -----------------------------------------------------------------------------------------------------

    def state(self, optimizer: int, keys: Sequence[int]) -> tuple[list[list[Any]], list[Tensor]]:
        """[key, steps, names] and the tensors of those names, of each key that has a state."""
        told: list[list[Any]] = []
        tensors: list[Tensor] = []
        for key in keys:
            held = self.ranges.get((optimizer, key))
            arrays = held.state() if held is not None else {}
            counted = arrays.pop("step", None)
            told.append([key, -1 if counted is None else int(counted), list(arrays), bool(arrays)])
            tensors += arrays.values()
        return told, tensors

    def snapshot(self) -> tuple[dict[str, Any], list[Tensor]]:
        """All that a copy of this needs, its values and every optimizer's state: what is told of them, and the tensors."""
        states, tensors = told_of(self.ranges)
        before = self.before.snapshot() if self.before is not None else None
        head = {"ranges": [list(r) for r in self.spec], "states": states, "updates": self.updates}
        if before is None:
            return head, [self.memory, *tensors]
        return {**head, "before": before[0]}, [self.memory, *tensors, *before[1]]

    def restore(self, head: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """The rest of what snapshot() gave, into a shard that was made with its memory; copies it."""
        rest = iter(tensors[1:])
        self.ranges = untold(head["states"], rest, self.values)
        self.updates = int(head["updates"])
        if self.before is not None and "before" in head:
            self.before.restore(head["before"], rest)

    def load(
        self,
        optimizer: int,
        recipes: Mapping[int, Recipe],
        told: Sequence[Sequence[Any]],
        tensors: Sequence[Tensor],
    ) -> None:
        """What state() gave, here or elsewhere. Keys that are not told of have none."""
        at, found = 0, {}
        for key, steps, names, there in told:
            arrays = dict(zip(names, tensors[at : at + len(names)], strict=True))
            at += len(names)
            if there:
                held = found[key] = Range(recipes[key], self.values[key])
                held.load({**arrays, **({"step": torch.tensor(float(steps))} if steps >= 0 else {})})
        if self.before is not None:
            self.before.last = None
        for key in recipes:
            self.ranges.pop((optimizer, key), None)
        self.ranges.update({(optimizer, key): held for key, held in found.items()})
