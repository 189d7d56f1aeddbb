"""`ps` on one host beside the all-reduce strategy: step times in one launch, all sides in alternating rounds.

    python benchmarks/ps_step.py [--workers 2] [--rounds 12] [--models transformer-25m,tensors-100x250000,tensors-2000x500]

`ps` alone is apply=worker. Ratios are all-reduce / ps: 1 is as fast, asked for are 0.9 for apply=worker; apply=server is told as it is.
The last line is what a copy of each server's state costs: the step with replicas=1 as a multiple of the one without, asked for at most 1.3.
Leaves a file in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import record

LIMIT_S = 540.0
MODELS = "transformer-25m,tensors-100x250000,tensors-2000x500"


def measure(workers: int, rounds: int, model: str) -> dict[str, list[float]]:
    worker = Path(__file__).with_name("ps_step_worker.py")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        command = [sys.executable, "-m", "echelon", "run", "--workers", str(workers), "--servers", "2", "--strategy", "ps",
                   "--run-dir", f"{folder}/run", str(worker), model, str(rounds), str(out)]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(record.ROOT)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        if not out.exists():
            sys.exit(f"the run failed with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        found: dict[str, list[float]] = json.loads(out.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--no-file", action="store_true", help="leave nothing in benchmarks/results")
    asked = parser.parse_args()
    results: dict[str, Any] = {}
    for model in asked.models.split(","):
        times = measure(asked.workers, asked.rounds, model)
        results[model] = {"load": os.getloadavg()[0]}
        print(f"{model}, {asked.workers} workers, load {os.getloadavg()[0]:.1f}")
        for side, values in times.items():
            found = record.verdict([a / b for a, b in zip(times["allreduce"], values, strict=True)], 0.9)
            results[model][side] = {**found, "step_ms": 1e3 * statistics.median(values)}
            print(
                f"  {side:28} {1e3 * statistics.median(values):9.2f} ms  "
                f"{found['median']:.2f} ({found['lower']:.2f}–{found['upper']:.2f})"
            )
        without, copied = (times[f"ps, apply=server, {what}"] for what in ("2 servers", "replicas=1"))
        costs = sorted(b / a for a, b in zip(without, copied, strict=True))
        results[model]["replicas cost"] = {
            "median": statistics.median(costs),
            "upper": costs[3 * len(costs) // 4],
        }
        print(
            f"  replicas=1 costs {statistics.median(costs):.2f} times the step (upper quartile {costs[3 * len(costs) // 4]:.2f})"
        )
    if not asked.no_file:
        path = record.write(f"ps-step-{asked.workers}workers", results, workers=asked.workers)
        print(f"written to {path.relative_to(record.ROOT)}")


if __name__ == "__main__":
    main()
