"""What it costs to be watched: tiny steps of two workers with the record of waits and progress, and without it.

    python benchmarks/stuck_overhead.py [rounds]

Both sides alternate in one run, in blocks of steps, so that a noisy machine is noisy for both. "Off" replaces
activity.waiting, inside and moved by things that do nothing; beats go on in both (they were there before).
Leaves a file in benchmarks/results/.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS = 10


def worker(rounds: int, out: Path) -> None:
    import torch

    import echelon
    from echelon import activity

    class Nothing:
        def __init__(self, *args: object) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...

    sides = {
        "on": (activity.waiting, activity.inside, activity.moved),
        "off": (Nothing, Nothing, lambda: None),
    }
    run = echelon.init()
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    model = torch.nn.Linear(8, 1)
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), 0.01), torch.utils.data.DataLoader(data, batch_size=16)
    )

    def batches():
        while True:
            yield from loader

    feed = batches()

    def block(side: str) -> float:
        activity.waiting, activity.inside, activity.moved = sides[side]  # type: ignore[misc]
        run.reduce(0.0, "max")
        began = time.perf_counter()
        for _ in range(STEPS):
            x, y = next(feed)
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - began) / STEPS

    for side in sides:
        block(side)
    times: dict[str, list[float]] = {"on": [], "off": []}
    for i in range(rounds):
        for side in ("on", "off") if i % 2 else ("off", "on"):
            times[side].append(block(side))
    if run.is_main:
        out.write_text(json.dumps(times))


def record_cost_ns() -> float:
    """One wait, one label and one count, alone."""
    from echelon import activity

    def once() -> None:
        with activity.waiting("gradients", 1, "all_reduce", 64):
            pass
        with activity.inside("data"):
            pass
        activity.moved()

    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(10_000):
            once()
        best = min(best, (time.perf_counter() - began) / 10_000)
    return best * 1e9


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "times.json"
        command = [sys.executable, "-m", "echelon", "run", "--workers", "2", "--run-dir", f"{name}/run", __file__,
                   "worker", str(rounds), str(out)]  # fmt: skip
        subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=900)
        times = json.loads(out.read_text())
    ratios = sorted(on / off for on, off in zip(times["on"], times["off"], strict=True))
    low = {side: statistics.median(sorted(spent)[: rounds // 2]) for side, spent in times.items()}
    found = {
        "ratio_median": statistics.median(ratios), "ratio_lower": ratios[len(ratios) // 4],
        "ratio_upper": ratios[3 * len(ratios) // 4], "ratio_of_lower_quartiles": low["on"] / low["off"], "rounds": rounds,
        "on_ms": 1e3 * statistics.median(times["on"]), "off_ms": 1e3 * statistics.median(times["off"]),
        "wait_label_and_count_ns": record_cost_ns(),
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    record = {"date": f"{datetime.now():%Y-%m-%d %H:%M}", "commit": commit.stdout.strip(), "cores": os.cpu_count(),
              "python": platform.python_version(), "results": found}  # fmt: skip
    path = (
        ROOT
        / "benchmarks"
        / "results"
        / f"{datetime.now():%Y-%m-%d}-stuck-overhead-{os.cpu_count()}cores.json"
    )
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
