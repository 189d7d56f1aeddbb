"""What every result says about where it was measured, and the file it is left in."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
ROUNDS_NEEDED = 20


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def verdict(ratios: Sequence[float], goal: float = 1.0) -> dict[str, object]:
    """Median and quartiles of peer / Echelon; met: median >= goal, lower quartile >= 0.97, in enough rounds."""
    ordered = sorted(ratios)
    median, lower = statistics.median(ordered), ordered[len(ordered) // 4]
    return {
        "median": median,
        "lower": lower,
        "upper": ordered[3 * len(ordered) // 4],
        "rounds": len(ordered),
        "goal": goal,
        "met": len(ordered) >= ROUNDS_NEEDED and median >= goal and lower >= 0.97,
    }


def write(name: str, results: object, folder: Path | None = None, **facts: object) -> Path:
    """benchmarks/results/DATE-NAME-Ncores.json."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in info if "model name" in line), "")
    now = datetime.now()
    record = {"date": f"{now:%Y-%m-%d %H:%M}", "commit": commit, "cpu": cpu, "cores": cores(),
              "python": platform.python_version(), "torch": torch.__version__, **facts, "results": results}  # fmt: skip
    path = (folder or ROOT / "benchmarks" / "results") / f"{now:%Y-%m-%d}-{name}-{cores()}cores.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
