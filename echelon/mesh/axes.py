"""A mesh: ranks laid out along named axes. One process is a mesh of one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

from echelon.errors import StrategyError

ORDER = ("data", "pipeline", "tensor")
"""Slowest to fastest: neighbours along `tensor` talk most, so they are neighbours in rank and share a host."""


def laid(size: int, data: int, widths: tuple[int, ...], tensor: int) -> Mesh:
    """The mesh of a run of `size` workers; data=0 takes what the other axes leave. Raises StrategyError with numbers that fit."""
    rest = sum(widths) * tensor
    if max(widths) > 1:
        if size != rest:
            text = "+".join(map(str, widths))
            raise StrategyError(
                f"pipeline={text} needs {rest} workers, and this run has {size}",
                remedy=f"Start it with --workers {rest}, or give every worker a stage.",
            )
        return Mesh((1, len(widths), 1), widths)
    if size % rest or (data and data * rest != size):
        fits = data * rest if data else max(1, size // rest) * rest
        asked = f"data={data} × " if data else ""
        raise StrategyError(
            f"{asked}pipeline={len(widths)} × tensor={tensor} does not make {size} workers",
            remedy=f"Start it with --workers {fits}, or choose axes whose product is {size}.",
        )
    return Mesh((size // rest, len(widths), tensor))


@dataclass(frozen=True)
class Mesh:
    """`sizes[axis]` ranks along each axis, in the order of `ORDER`; rank = mixed-radix number of its coordinates."""

    sizes: tuple[int, ...] = (1, 1, 1)
    widths: tuple[int, ...] = ()
    """Workers of each stage, where some stage has several: then ranks are in the order of stages, and there are no other axes."""

    @property
    def size(self) -> int:
        return sum(self.widths) or math.prod(self.sizes)

    def stage(self, rank: int) -> int:
        """The stage of the pipeline that `rank` has (with interleaving: its first)."""
        if self.widths:
            return next(s for s in range(len(self.widths)) if rank < sum(self.widths[: s + 1]))
        return self.coordinates(rank)["pipeline"]

    def deal(self, rank: int) -> tuple[int, int]:
        """Which part of each batch is this rank's, and of how many; those that hold one replica of the model have the same."""
        return (0, 1) if self.widths else (self.coordinates(rank)["data"], self.sizes[0])

    def alike(self, rank: int) -> list[int]:
        """The ranks that have the other parts of a batch, itself included, and the same place in the model."""
        return [rank] if self.widths else self.group(rank, "data")

    def replicas(self, rank: int) -> list[int]:
        """The ranks that hold the same part of the model, itself included: among them gradients meet."""
        if self.widths:
            return [r for r in range(self.size) if self.stage(r) == self.stage(rank)]
        return self.group(rank, "data")

    def pipe(self, rank: int) -> list[int]:
        """The ranks among which this one's micro-batches travel, in the order of stages."""
        return list(range(self.size)) if self.widths else self.group(rank, "pipeline")

    def model(self, rank: int) -> list[int]:
        """The ranks that hold one replica of the model together; where stages have several workers, all of them."""
        if self.widths:
            return list(range(self.size))
        at = self.coordinates(rank)["data"]
        return [r for r in range(self.size) if self.coordinates(r)["data"] == at]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on each axis."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in a mesh of {self.size}")
        found: list[int] = []
        for size in reversed(self.sizes):
            rank, at = divmod(rank, size)
            found.append(at)
        return dict(zip(ORDER, reversed(found), strict=True))

    def rank(self, coordinates: dict[str, int]) -> int:
        """The rank at these coordinates (axes left out are 0)."""
        rank = 0
        for axis, size in zip(ORDER, self.sizes, strict=True):
            rank = rank * size + coordinates.get(axis, 0)
        return rank

    def group(self, rank: int, axis: str) -> list[int]:
        """The ranks that differ from `rank` along `axis` only, itself included, in order."""
        at = self.coordinates(rank)
        size = self.sizes[ORDER.index(axis)]
        return [self.rank({**at, axis: i}) for i in range(size)]
