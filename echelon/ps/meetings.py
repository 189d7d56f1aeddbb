"""update=local: what a part of a meeting weighs, and who may go on after it. Pure.

Workers take their steps alone and come to a meeting after so many of them. They also come where a script needs all of them at one
place: at the end of a loop, before an evaluation, a save, a checkpoint. Such a point is a gathering; scripts pass them in one
order, so their number says how far a worker is. Who is at one has no steps to take: it comes to every meeting, weighs nothing,
takes what the others agree on, and goes on when nobody is at an earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """Where a worker is when it comes to a meeting."""

    reached: int
    """Gatherings that it came to so far, this one included."""
    over: bool
    """It is at one, and takes no steps until it may go on."""
    stop: bool
    """It was asked to stop."""

    def to_plain(self) -> list[int]:
        return [self.reached, int(self.over), int(self.stop)]

    @classmethod
    def from_plain(cls, plain: Any) -> Place:
        """Of what came from a wire: anything but three numbers raises TypeError or ValueError."""
        reached, over, stop = plain
        return cls(int(reached), bool(over), bool(stop))


@dataclass(frozen=True)
class Verdict:
    """What follows for those who came: the same for all."""

    passed: int
    """Gatherings up to this one are over."""
    ended: bool
    """All are at a gathering and somebody was asked to stop: nobody comes to another meeting."""
    stop: bool
    """Somebody was asked to stop."""
    reason: str


def verdict(places: Sequence[Place]) -> Verdict:
    """What a meeting of all workers, each at its place, decides."""
    stop = any(place.stop for place in places)
    lowest = min(place.reached for place in places)
    if stop and all(place.over for place in places):
        return Verdict(lowest, True, True, "all are at one place, and the run is to stop")
    behind = [rank for rank, place in enumerate(places) if place.reached == lowest and not place.over]
    why = (
        f"worker {', '.join(map(str, behind))} still takes steps" if behind else "nobody is at an earlier one"
    )
    return Verdict(lowest, False, stop, why)


def weights(counts: Sequence[int]) -> list[float]:
    """Each part's weight: its samples since the last meeting, of all. All 0 if nobody took a step: then nothing moves."""
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]
