"""From the command to the end of the first step, 2 and 8 workers: `echelon run` beside torchrun with DDP, in alternation.

    python benchmarks/starts.py [--rounds 5] [--workers 2 8]

Ratios are echelon / torchrun: below 1 Echelon is faster. `cold` is ECHELON_START=cold: every worker imports torch for itself.
Private memory is what a worker has for itself when its first step begins (Private_Clean + Private_Dirty of smaps_rollup).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record

SCRIPT = """
import json, os, sys, time, torch
{setup}
model = torch.nn.Linear(8, 8)
x, y = torch.randn(64, 8), torch.randn(64, 8)
{wrap}
private = sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Private_"))
torch.nn.functional.mse_loss(model(x[:8]), y[:8]).backward(); opt.step()
if rank == 0:
    open(sys.argv[1] + ".new", "w").write(json.dumps([time.time(), private / 1024]))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
"""
OURS = SCRIPT.format(
    setup="import echelon; run = echelon.init(); rank = run.rank",
    wrap="model, opt = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))",
)
THEIRS = SCRIPT.format(
    setup="import torch.distributed as dist; dist.init_process_group('gloo'); rank = dist.get_rank()",
    wrap="from torch.nn.parallel import DistributedDataParallel\nmodel = DistributedDataParallel(model); opt = torch.optim.SGD(model.parameters(), 0.1)",
)
GOALS = {2: 0.75, 8: 0.3}
"""How much of torchrun's time may be needed at most."""


def command(side: str, workers: int) -> list[str]:
    if side == "torchrun":
        many = ("--standalone", "--nproc-per-node", str(workers))
        return [sys.executable, "-m", "torch.distributed.run", *many, "theirs.py"]
    return [sys.executable, "-m", "echelon", "run", "--workers", str(workers), "ours.py"]


def launch(side: str, workers: int, folder: Path) -> tuple[float, float]:
    """Seconds to the end of the first step, and MiB that worker 0 had for itself."""
    env = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(record.ROOT),
           "ECHELON_RUNS": f"{folder}/runs", "ECHELON_START": "cold" if side == "cold" else "fork"}  # fmt: skip
    out = folder / "first-step"
    out.unlink(missing_ok=True)
    began = time.time()
    done = subprocess.run(
        [*command(side, workers), str(out)], cwd=folder, env=env, capture_output=True, text=True, timeout=180
    )
    if not out.exists():
        raise SystemExit(f"{side} with {workers} workers failed:\n{done.stdout}{done.stderr}")
    ended, private = json.loads(out.read_text())
    return ended - began, private


def measure(workers: int, rounds: int, folder: Path) -> dict[str, object]:
    sides = ("echelon", "torchrun", "cold")
    times: dict[str, list[float]] = {side: [] for side in sides}
    private: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 else reversed(sides):
            seconds, own = launch(side, workers, folder)
            times[side].append(seconds)
            private[side].append(own)
    found: dict[str, object] = {f"{side}_s": statistics.median(values) for side, values in times.items()}
    found |= {f"{side}_private_MiB": statistics.median(values) for side, values in private.items()}
    of_torchrun = statistics.median(times["echelon"]) / statistics.median(times["torchrun"])
    goal = GOALS.get(workers)
    found |= {
        "of_torchrun": of_torchrun,
        "goal": goal,
        "met": goal is None or of_torchrun <= goal,
        "all_s": times,
    }
    print(f"{workers} workers: echelon {found['echelon_s']:.2f} s, torchrun {found['torchrun_s']:.2f} s, cold {found['cold_s']:.2f} s;"
          f" of torchrun's {of_torchrun:.2f}, goal {goal}; private MiB a worker: {found['echelon_private_MiB']:.0f},"
          f" torchrun {found['torchrun_private_MiB']:.0f}, cold {found['cold_private_MiB']:.0f}", flush=True)  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--no-file", action="store_true", help="leave nothing in benchmarks/results")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ours.py").write_text(OURS)
        (Path(folder) / "theirs.py").write_text(THEIRS)
        found = {
            f"{workers} workers": measure(workers, asked.rounds, Path(folder)) for workers in asked.workers
        }
    if not asked.no_file:
        path = record.write("starts", found, load=os.getloadavg(), rounds=asked.rounds)
        print(f"written to {path.relative_to(record.ROOT)}")


if __name__ == "__main__":
    main()
