"""Measures Echelon beside its peers in one run, alternating rounds, and leaves a file in benchmarks/results/.

    python benchmarks/run.py                 everything (about 10 minutes on 2 cores)
    python benchmarks/run.py step            only these: step, import

Ratios are peer / Echelon: above 1 Echelon is faster. "Met" means median >= 1.0 and lower quartile >= 0.97 of >= 20 rounds.
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

import torch

sys.path.insert(0, str(Path(__file__).parent))
from models import NAMES

ROOT = Path(__file__).parents[1]
ROUNDS = 30


def quartiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "lower": ordered[len(ordered) // 4],
        "upper": ordered[3 * len(ordered) // 4],
    }


def verdict(ratios: list[float]) -> dict[str, object]:
    q = quartiles(ratios)
    return {
        **q,
        "rounds": len(ratios),
        "met": len(ratios) >= 20 and q["median"] >= 1.0 and q["lower"] >= 0.97,
    }


def step_times(workers: int = 2) -> dict[str, object]:
    """A training step against DistributedDataParallel over gloo."""
    results: dict[str, object] = {}
    for name in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "times.json"
            command = [sys.executable, "-m", "echelon", "run", "--workers", str(workers), "--run-dir", f"{folder}/run",
                       str(ROOT / "benchmarks" / "step_worker.py"), name, str(ROUNDS), str(out), ""]  # fmt: skip
            for tries in range(1, 4):  # DDP's sparse path over gloo aborts now and then (docs/log.md)
                done = subprocess.run(
                    [*command[:7], f"{folder}/run{tries}", *command[8:]],
                    capture_output=True,
                    text=True,
                    timeout=600,
                )
                if out.exists():
                    break
            if not out.exists():
                results[name] = {"failed": done.stderr[-300:]}
                print(f"{name:18} failed: {done.stderr[-200:]}")
                continue
            times = json.loads(out.read_text())
        ratios = [d / e for d, e in zip(times["ddp"], times["echelon"], strict=True)]
        found = verdict(ratios) | {
            "echelon_ms": 1e3 * statistics.median(times["echelon"]),
            "ddp_ms": 1e3 * statistics.median(times["ddp"]),
            "tries": tries,
        }
        results[name] = found
        print(f"{name:18} echelon {found['echelon_ms']:8.2f} ms   ddp {found['ddp_ms']:8.2f} ms   ratio {found['median']:.3f} "
              f"({found['lower']:.3f}–{found['upper']:.3f}) {'met' if found['met'] else 'missed'}", flush=True)  # fmt: skip
    return results


def import_times() -> dict[str, object]:
    """What `import echelon` and `echelon --help` cost over a bare python, best of 10."""

    def best(*command: str) -> float:
        spent = []
        for _ in range(10):
            began = time.perf_counter()
            subprocess.run([sys.executable, *command], capture_output=True, check=True)
            spent.append(time.perf_counter() - began)
        return 1e3 * min(spent)

    bare = best("-c", "pass")
    found = {"import_ms": best("-c", "import echelon") - bare, "help_ms": best("-m", "echelon", "--help")}
    print(
        f"import echelon {found['import_ms']:.0f} ms over a bare python, echelon --help {found['help_ms']:.0f} ms in all"
    )
    return found


def main() -> None:
    chosen = sys.argv[1:] or ["import", "step"]
    parts = {"import": import_times, "step": step_times}
    results: dict[str, object] = {name: parts[name]() for name in chosen}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "",
    )
    record = {"date": f"{datetime.now():%Y-%m-%d %H:%M}", "commit": commit, "cpu": cpu, "cores": os.cpu_count(),
              "python": platform.python_version(), "torch": torch.__version__, "results": results}  # fmt: skip
    path = (
        ROOT
        / "benchmarks"
        / "results"
        / f"{datetime.now():%Y-%m-%d}-{'-'.join(chosen)}-{os.cpu_count()}cores.json"
    )
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
