"""apply=server with values that come behind the next forward, beside values that step() waits for: one launch, alternating rounds.

    python benchmarks/ps_hidden.py [--workers 2] [--servers 2] [--rate 1gbit] [--model resnet18] [--rounds 6] [--steps 3]
    python benchmarks/ps_hidden.py --rate "" ...      all on one host, in shared memory

Workers and servers are hosts of their own, made as network namespaces behind links that are shaped on both ends (needs root, ip, tc).
Ratios are waited / hidden: above 1 hiding is faster. Leaves a file in benchmarks/results/ unless told not to.
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
sys.path.insert(0, str(Path(__file__).parents[1]))
import record
from comm_hosts import shape
from ps_hosts import LIMIT_S, launch

from tests.flows.netns import Network

WORKER = "ps_hidden_worker.py"


def on_one_host(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    out = folder / "times.json"
    command = [sys.executable, "-m", "echelon", "run", "--workers", str(asked.workers), "--servers", str(asked.servers),
               "--strategy", "ps", "--run-dir", str(folder / "run"), str(Path(__file__).with_name(WORKER)),
               str(asked.rounds), str(asked.steps), "0", str(out), asked.model]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(record.ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    if not out.exists():
        sys.exit(f"the run failed with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def among_hosts(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    asked.mib, asked.set = 0, asked.model
    network = Network(asked.workers + asked.servers)
    try:
        shape(network, asked.rate)
        return launch(network, asked, folder, WORKER)
    finally:
        network.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help='"" for one host')
    parser.add_argument(
        "--model",
        default="resnet18",
        help="of models.py, or tensors-COUNTxNUMEL; resnet18@16 for batches of 16; slow-LAYERSxNUMELxMS",
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3, help="of each side in a round")
    parser.add_argument("--no-file", action="store_true", help="leave nothing in benchmarks/results")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        times = among_hosts(asked, Path(name)) if asked.rate else on_one_host(asked, Path(name))
    gains = sorted(a / b for a, b in zip(times["waited"], times["hidden"], strict=True))
    where = asked.rate or "one host"
    print(
        f"{asked.model}, {asked.workers} workers, {asked.servers} servers, {where}; load {os.getloadavg()[0]:.1f}"
    )
    for side, values in times.items():
        print(f"  {side:8} {1e3 * statistics.median(values):9.1f} ms a step")
    print(
        f"  waited / hidden: {statistics.median(gains):.2f} ({gains[len(gains) // 4]:.2f}–{gains[3 * len(gains) // 4]:.2f})"
    )
    if not asked.no_file:
        rows = {"times_s": times, "gain": statistics.median(gains), "load": os.getloadavg()[0]}
        about = {"workers": asked.workers, "servers": asked.servers, "model": asked.model, "rate": where}
        path = record.write(f"ps-hidden-{asked.model.replace('@', '-')}", rows, **about)
        print(f"written to {path.relative_to(record.ROOT)}")


if __name__ == "__main__":
    main()
