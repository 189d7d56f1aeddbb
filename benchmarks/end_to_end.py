"""The all-reduce strategy beside plain DDP over gloo for the transformer of 25 million parameters, and where each step's time goes.

    python benchmarks/end_to_end.py                  2 workers, about 2 minutes on 2 cores
    python benchmarks/end_to_end.py --workers 8

Both train in one launch, in alternating rounds; ratios are DDP / Echelon. "After backward" is the time from the last gradient that is
computed to the end of backward() on the worker that came last: waiting for messages, and putting in place what they brought.
"Skew" is what the other workers waited for that one. "Alone" is how long the same buckets take with nothing else to do;
hidden = 1 - after / alone is the share of it that backward covered.
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

sys.path.insert(0, str(Path(__file__).parent))
import record

NAMES = {"echelon": "echelon", "ddp": "DDP, gloo"}
PARTS = {"data": "data", "forward": "forward", "backward": "backward", "exposed": "after", "skew": "skew", "optimizer": "optimizer", "alone": "alone"}  # fmt: skip
LIMIT_S = 540.0


def measure(workers: int, rounds: int, model: str) -> dict[str, object]:
    worker = Path(__file__).with_name("step_worker.py")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        command = [sys.executable, "-m", "echelon", "run", "--workers", str(workers), "--run-dir", f"{folder}/run",
                   str(worker), model, str(rounds), str(out), "", "split"]  # fmt: skip
        env = {
            "GLOO_SOCKET_IFNAME": "lo",
            **os.environ,
            "PYTHONPATH": str(record.ROOT),
            "CUDA_VISIBLE_DEVICES": "",
        }  # as the peers, on CPU
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        if not out.exists():
            sys.exit(f"the run failed with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        found = json.loads(out.read_text())
    times = {side: found.pop(side) for side in NAMES}
    parts = {
        side: {f"{name}_ms": 1e3 * spent for name, spent in of.items()} | {"hidden": 1 - of["exposed"] / of["alone"]}
        for side, of in found.pop("split").items()
    }  # fmt: skip
    return {
        **record.verdict([d / e for d, e in zip(times["ddp"], times["echelon"], strict=True)]),
        **{f"{side}_ms": 1e3 * statistics.median(values) for side, values in times.items()},
        "split": parts,
        **found,
    }


def table(found: dict[str, object]) -> str:
    lines = [
        f"{'ms a step':10} {'in all':>8} "
        + " ".join(f"{shown:>10}" for shown in PARTS.values())
        + "   hidden"
    ]
    for side, shown in NAMES.items():
        of = found["split"][side]  # type: ignore[index]
        cells = " ".join(f"{of[f'{name}_ms']:10.2f}" for name in PARTS)
        lines.append(f"{shown:10} {found[f'{side}_ms']:8.1f} {cells}   {max(0.0, of['hidden']):6.0%}")
    lines.append(
        f"ratio {found['median']:.2f} ({found['lower']:.2f}–{found['upper']:.2f}) in {found['rounds']} rounds: "
        f"{'met' if found['met'] else 'missed'}"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--model", default="transformer-25m")
    parser.add_argument("--no-file", action="store_true", help="leave nothing in benchmarks/results")
    asked = parser.parse_args()
    found = measure(asked.workers, asked.rounds, asked.model)
    print(table(found))
    if not asked.no_file:
        path = record.write(f"end-to-end-{asked.workers}workers", {asked.model: found}, workers=asked.workers)
        print(f"written to {path.relative_to(record.ROOT)}")


if __name__ == "__main__":
    main()
