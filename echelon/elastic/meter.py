"""run.log averaged over the workers, without a collective: what each logged at a step meets here. Pure.

A value is complete when every awaited rank has logged it at that step; then it leaves as one weighted mean. A step
that even the slowest rank left KEEP_STEPS behind leaves with what it has (ranks send in batches: one may be far ahead). A name logged several times in one step meets
first with first, second with second.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from echelon.events import Logged, Metric

KEEP_STEPS = 50
MAX_OPEN = 10_000
"""Values that wait for ranks, over all steps and names; beyond it the oldest leave incomplete."""

Parts = dict[int, tuple[float, float]]
"""Rank -> (value, weight)."""


@dataclass
class Meter:
    """State of the averaging. `awaited` are the ranks that are at work or still to come."""

    _open: dict[int, dict[str, list[Parts]]] = field(default_factory=dict)
    _at: dict[int, int] = field(default_factory=dict)
    """Rank -> the newest step it logged."""
    _left: int = 0
    """Steps up to here have left."""
    _num_open: int = 0

    def add(self, logged: Logged, awaited: Set[int]) -> list[Metric]:
        """What one worker logged; gives the means that this completed, oldest step first."""
        if logged.rank is None or logged.step <= self._left:
            return []  # its step left already
        self._at[logged.rank] = max(self._at.get(logged.rank, 0), logged.step)
        names = self._open.setdefault(logged.step, {})
        for name, value in logged.values.items():
            rounds = names.setdefault(name, [])
            parts = next((p for p in rounds if logged.rank not in p), None)
            if parts is None:
                parts = {}
                rounds.append(parts)
                self._num_open += 1
            parts[logged.rank] = (value, logged.weight)
        slowest = min((self._at.get(rank, 0) for rank in awaited), default=0)
        self._left = max(self._left, slowest - KEEP_STEPS)
        old = sorted(step for step in self._open if step <= self._left)
        left = [metric for step in old for metric in self._leave(step, None)]
        while self._num_open > MAX_OPEN:
            left += self._leave(min(self._open), None)
        return left + self._leave(logged.step, awaited, logged.values)

    def settle(self, awaited: Set[int]) -> list[Metric]:
        """The means that are complete now that fewer ranks are awaited."""
        return [metric for step in sorted(self._open) for metric in self._leave(step, awaited)]

    def finish(self) -> list[Metric]:
        """Everything that is left, complete or not."""
        return [metric for step in sorted(self._open) for metric in self._leave(step, None)]

    def _leave(self, step: int, awaited: Set[int] | None, among: Iterable[str] | None = None) -> list[Metric]:
        """Takes out the rounds of `step` that are complete (None: all), one Metric a round; only `among` these names."""
        names = self._open.get(step, {})
        done: list[dict[str, float]] = []
        for name in list(names) if among is None else [name for name in among if name in names]:
            rounds = names[name]
            index = 0
            while rounds and (awaited is None or awaited <= rounds[0].keys()):
                if index == len(done):
                    done.append({})
                done[index][name] = mean(rounds.pop(0))
                self._num_open -= 1
                index += 1
            if not rounds:
                del names[name]
        if not names:
            self._open.pop(step, None)
        return [Metric(step=step, values=values) for values in done]


def mean(parts: Parts) -> float:
    """The mean weighted by samples, summed in rank order; the plain mean when nobody had a sample."""
    ordered = [parts[rank] for rank in sorted(parts)]
    total = sum(weight for _, weight in ordered)
    if total <= 0:
        return sum(value for value, _ in ordered) / len(ordered)
    return sum(value * weight for value, weight in ordered if weight > 0) / total
