"""`echelon bench comm`: what the collectives of this machine or cluster cost, beside each other and beside the limit. Pure.

The measuring happens in comm_worker.py, in real workers; this file says what is measured and shows what came out.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from echelon.errors import UsageError

OPS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "send",
    "barrier",
)
SIZES = ("1KiB", "64KiB", "1MiB", "25MiB")
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
SEGMENT, LIMIT = "native, in place", "bare loop"
"""Besides backends: gradients in the group's own buffers, and the loop that nothing can beat by much."""


@dataclass(frozen=True)
class Cell:
    """One row of the result: `op` on `num_bytes` a rank over `backend`. Times are of the slowest rank, seconds."""

    op: str
    num_bytes: int
    backend: str
    median_s: float
    quartile_s: float
    rounds: int
    calls: int = 1
    """One after the other in a round, whose time is divided by them."""

    @property
    def gigabytes_per_s(self) -> float:
        """Payload a rank over time."""
        return self.num_bytes / self.median_s / 1e9 if self.median_s else 0.0


def parse_sizes(text: str) -> list[int]:
    """ "1KiB,25MiB" -> bytes, rounded up to whole float32."""
    sizes = []
    for word in text.split(","):
        word = word.strip()
        unit = next((u for u in ("KiB", "MiB", "GiB", "B") if word.endswith(u)), "B")
        number = word.removesuffix(unit)
        try:
            sizes.append(max(4, (int(float(number) * UNITS[unit]) + 3) // 4 * 4))
        except ValueError:
            raise UsageError(
                f"--sizes: {word!r} is not a size", remedy="Write numbers with B, KiB, MiB or GiB, as in 1KiB,25MiB."
            ) from None  # fmt: skip
    return sizes


def parse_ops(text: str) -> list[str]:
    ops = [word.strip() for word in text.split(",")]
    unknown = [op for op in ops if op not in OPS]
    if unknown:
        raise UsageError(f"--ops: no operation {unknown[0]!r}", remedy=f"There are {', '.join(OPS)}.")
    return ops


def rounds_for(num_bytes: int) -> int:
    """Few for long ones, so that a cell takes about a second."""
    return 60 if num_bytes <= 1 << 16 else 40 if num_bytes <= 1 << 20 else 20


def calls_for(num_bytes: int) -> int:
    """Calls of a round: as many as it takes for the moment when the ranks begin, and the clock, not to count."""
    return 20 if num_bytes <= 1 << 16 else 10 if num_bytes <= 1 << 25 else 3


def cell(op: str, num_bytes: int, backend: str, seconds: list[float], calls: int = 1) -> Cell:
    """Of the seconds that each round took."""
    ordered = sorted(one / calls for one in seconds)
    return Cell(
        op, num_bytes, backend, statistics.median(ordered), ordered[len(ordered) // 4], len(ordered), calls
    )


def size_words(num_bytes: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        if num_bytes >= UNITS[unit]:
            return f"{num_bytes / UNITS[unit]:g} {unit}"
    return f"{num_bytes} B"


def time_words(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def table(cells: list[Cell]) -> list[str]:
    """Lines for a terminal of 80 columns: time, payload a second, how many times the slowest, share of the limit."""
    lines = [f"{'operation':<15}{'size':>9}  {'over':<17}{'time':>11}{'GB/s':>8}{'against':>9}{'limit':>8}"]
    groups: dict[tuple[str, int], list[Cell]] = {}
    for one in cells:
        groups.setdefault((one.op, one.num_bytes), []).append(one)
    for (op, num_bytes), rows in groups.items():
        slowest = max(row.median_s for row in rows)
        limit = next((row.median_s for row in rows if row.backend == LIMIT), None)
        for row in rows:
            share = f"{limit / row.median_s:.0%}" if limit else ""
            lines.append(
                f"{op if row is rows[0] else '':<15}{size_words(num_bytes) if row is rows[0] else '':>9}  {row.backend:<17}"
                f"{time_words(row.median_s):>11}{row.gigabytes_per_s:>8.2f}{slowest / row.median_s:>8.1f}×{share:>8}"
            )
    return lines


def record(cells: list[Cell], about: dict[str, Any]) -> dict[str, Any]:
    """What --json writes."""
    return about | {"cells": [asdict(one) | {"gigabytes_per_s": one.gigabytes_per_s} for one in cells]}
