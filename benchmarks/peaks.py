"""The most memory of a worker beside what was predicted, with each allocator: large batches, and a model larger than its batches.

    python benchmarks/peaks.py [--small] [--strategies …]

Of each form the worker that is furthest off. No limit is set, so nothing has to be given back.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import record

sys.path.insert(0, str(record.ROOT))
from echelon.launch import allocator
from tests.flows.test_measured import LARGE, LAYERS, SCRIPT, WIDTH

FORMS = (
    ("allreduce", 2, 0), ("allreduce,accumulate=2", 2, 0), ("ps", 2, 1), ("ps,apply=server", 2, 1),
    ("sharded,level=1", 2, 0), ("sharded,level=2", 2, 0), ("sharded,level=3", 2, 0), ("tensor=2", 2, 0),
    ("pipeline=2,microbatches=4", 2, 0), ("pipeline=2,microbatches=4,schedule=gpipe", 2, 0),
    ("pipeline=2,microbatches=4,schedule=zero-bubble", 2, 0), ("pipeline=2,microbatches=4,schedule=interleaved", 2, 0),
    ("pipeline=3+1,microbatches=4", 4, 0), ("data=2,pipeline=2,microbatches=2", 4, 0),
    ("tensor=2,pipeline=2,microbatches=2", 4, 0),
)  # fmt: skip
SIDES = {"tcmalloc": "auto", "glibc": "none"}


def launch(
    folder: Path, side: str, strategy: str, workers: int, servers: int, args: tuple[int, ...]
) -> tuple[float, float]:
    """(predicted, at most) in MiB."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("ECHELON_")}
    env |= {
        "PYTHONPATH": str(record.ROOT),
        "ECHELON_RUNS": str(folder / "runs"),
        "ECHELON_MALLOC": SIDES[side],
    }
    if side == "glibc":
        env |= allocator.GLIBC
    command = [sys.executable, "-m", "echelon", "run", "--workers", str(workers), "--strategy", strategy,
               *(("--servers", str(servers)) if servers else ()), "train.py", *map(str, args)]  # fmt: skip
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    found = json.loads((folder / "runs" / "latest" / "run.json").read_text())["measured"].values()
    worst = max(found, key=lambda one: abs(one["peak_bytes"] / one["peak_bytes_expected"] - 1))
    return worst["peak_bytes_expected"] / 2**20, worst["peak_bytes"] / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--small",
        action="store_true",
        help="12 layers of 4 MiB with batches of 8 rows instead of large batches",
    )
    parser.add_argument("--strategies", nargs="+", help="only these")
    parser.add_argument("--no-file", action="store_true", help="leave nothing in benchmarks/results")
    asked = parser.parse_args()
    results: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT)
        for strategy, workers, servers in FORMS:
            if asked.strategies and strategy not in asked.strategies:
                continue
            more = workers > 2 or "accumulate" in strategy or "microbatches" in strategy
            args = (WIDTH, LAYERS, 8) if asked.small else (128, 16, LARGE * (1 + more))
            for side in SIDES:
                predicted, most = launch(Path(folder), side, strategy, workers, servers, args)
                results.setdefault(strategy, {})[side] = [round(predicted), round(most)]
                print(f"{strategy:52} {side:9} predicted {predicted:5.0f} MiB, at most {most:5.0f}: {most / predicted - 1:+.1%}",
                      flush=True)  # fmt: skip
    if not asked.no_file:
        path = record.write("peaks-small" if asked.small else "peaks-large", results)
        print(f"written to {path.relative_to(record.ROOT)}")


if __name__ == "__main__":
    main()
