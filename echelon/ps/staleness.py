"""How stale the parts of updates were: p50, p99, max and a histogram, in bounded memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping

EXACT = 64
"""Up to here each value has its own count; above, powers of two share one."""


class Staleness:
    """Counts by value. A percentile of large values is the upper end of its class, at most the maximum: never too low."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.total = 0
        self.max = 0

    def add(self, value: int, times: int = 1) -> None:
        if value < 0:
            raise ValueError(f"staleness {value}: a part cannot be computed on parameters of the future")
        top = _class(value)
        self._counts[top] = self._counts.get(top, 0) + times
        self.total += times
        self.max = max(self.max, value)

    def percentile(self, percent: float) -> int:
        """The least value that at least `percent` of all parts do not exceed; 0 without any."""
        need = self.total * percent / 100
        seen = 0
        for top in sorted(self._counts):
            seen += self._counts[top]
            if seen >= need:
                return min(top, self.max)
        return self.max

    @property
    def p50(self) -> int:
        return self.percentile(50)

    @property
    def p99(self) -> int:
        return self.percentile(99)

    def histogram(self) -> dict[int, int]:
        """Upper end of each class that occurred -> how many, in order."""
        return {top: self._counts[top] for top in sorted(self._counts)}

    def merge(self, histogram: Mapping[int, int], largest: int) -> None:
        """Adds what another server counted: its histogram() and its max."""
        for top, times in histogram.items():
            self._counts[_class(top)] = self._counts.get(_class(top), 0) + times
            self.total += times
        self.max = max(self.max, largest)

    def classes(self) -> dict[str, int]:
        """The histogram in few classes, for people and events: 0, 1, 2-3, 4-7, 8-15 … by their lower ends -> how many."""
        found: dict[int, int] = {}
        for top, times in self._counts.items():
            lower = 1 << (top.bit_length() - 1) if top else 0
            found[lower] = found.get(lower, 0) + times
        return {str(lower): found[lower] for lower in sorted(found)}


def _class(value: int) -> int:
    return value if value < EXACT else (1 << value.bit_length()) - 1
