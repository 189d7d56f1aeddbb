"""update=local: what one server holds of a model of which every worker has its own copy. Flat runs of one type in one memory.

A run is everything of one type and kind that lies together, padding included: a meeting works on runs, not on tensors. Kind
"outer" is the parameters; "mean" is what is only ever averaged (BatchNorm's moments). Not for two threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echelon.errors import UsageError
from echelon.ps.optimizers import Range
from echelon.ps.recipes import Recipe

DTYPES = {"float32": torch.float32, "float64": torch.float64}
KINDS = ("outer", "mean")


@dataclass(frozen=True)
class Run:
    """Bytes [begin, end) of the memory."""

    begin: int
    end: int
    dtype: torch.dtype
    kind: str

    def of(self, memory: Tensor) -> Tensor:
        return memory[self.begin : self.end].view(self.dtype)


def runs_of(ranges: Sequence[Sequence[Any]], num_bytes: int) -> list[Run]:
    """Neighbours of one type and kind as one; `ranges` are [offset in bytes, elements, type, kind] in the order of offsets."""
    found: list[Run] = []
    for offset, numel, name, kind in ranges:
        dtype = DTYPES.get(name)
        if (
            dtype is None
            or kind not in KINDS
            or offset % 64
            or numel < 0
            or offset < (found[-1].end if found else 0)
        ):
            raise UsageError(f"a range of {numel} {name} ({kind}) at byte {offset} cannot be held here")
        end = offset + numel * dtype.itemsize
        if end > num_bytes:
            raise UsageError(f"a range ends at byte {end} of {num_bytes}")
        if found and (found[-1].dtype, found[-1].kind) == (dtype, kind):
            found[-1] = Run(found[-1].begin, end, dtype, kind)
        else:
            found.append(Run(offset, end, dtype, kind))
    return found


class Outer:
    """`recipe` is the outer optimizer's, None where the parameters become the mean. The memory starts with worker 0's values."""

    def __init__(
        self,
        ranges: Sequence[Sequence[Any]],
        memory: Tensor,
        recipe: Recipe | None,
        momentum: Tensor | None = None,
    ) -> None:
        self.spec = [tuple(r) for r in ranges]
        self.memory = memory.view(torch.uint8).clone()
        self.recipe, self.updates = recipe, 0
        self.runs = runs_of(self.spec, self.memory.numel())
        self.optimizers = (
            {run: Range(recipe, run.of(self.memory)) for run in self.runs if run.kind == "outer"}
            if recipe
            else {}
        )
        if momentum is not None:
            self.check(momentum)
            for run, optimizer in self.optimizers.items():
                optimizer.load({"momentum_buffer": run.of(momentum)})

    def check(self, part: Tensor) -> None:
        """Raises unless this is laid out as the memory is."""
        if part.dtype != torch.uint8 or part.shape != self.memory.shape:
            raise UsageError(
                f"{part.nbytes} bytes of {part.dtype} came for {self.memory.numel()} bytes of values"
            )

    def meet(self, parts: Sequence[tuple[Tensor, float]]) -> None:
        """The values become the weighted mean of the parts, or an outer optimizer's step towards it. In the order given."""
        for run in self.runs:
            value, mean = run.of(self.memory), _mean([(run.of(part), weight) for part, weight in parts])
            optimizer = self.optimizers.get(run)
            if optimizer is None:
                value.copy_(mean)
            else:
                optimizer.apply(torch.sub(value, mean))
        self.updates += 1

    def add(self, delta: Tensor, scale: float) -> None:
        """How far a worker went, times `scale`, on top of the values."""
        for run in self.runs:
            run.of(self.memory).add_(run.of(delta), alpha=scale)
        self.updates += 1

    def momentum(self) -> Tensor | None:
        """The outer optimizer's, laid out as the memory; None if there is none yet."""
        found = None
        for run, optimizer in self.optimizers.items():
            buffer = optimizer.arrays.get("momentum_buffer")
            if buffer is not None:
                found = torch.zeros_like(self.memory) if found is None else found
                run.of(found).copy_(buffer)
        return found


def _mean(parts: Sequence[tuple[Tensor, float]]) -> Tensor:
    """Of weights that sum to one, as the first and what the others differ by: where all are equal, it is that value to the bit."""
    (first, _), *others = parts
    mean = first.clone()
    for x, weight in others:
        mean.add_(torch.sub(x, first), alpha=weight)
    return mean
