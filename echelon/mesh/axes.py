"""A mesh: ranks laid out along named axes. One process is a mesh of one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

ORDER = ("data", "pipeline", "tensor")
"""Slowest to fastest: neighbours along `tensor` talk most, so they are neighbours in rank and share a host."""


@dataclass(frozen=True)
class Mesh:
    """`sizes[axis]` ranks along each axis, in the order of `ORDER`; rank = mixed-radix number of its coordinates."""

    sizes: tuple[int, ...] = (1, 1, 1)

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

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
