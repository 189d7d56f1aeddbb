"""Steps with servers on hosts of their own: 3 worker hosts with 0, 1 and 2 server hosts, on links of 1 Gbit/s.

    python benchmarks/ps_hosts.py [--workers 3] [--servers 2] [--rate 1gbit] [--mib 50] [--rounds 8] [--steps 4]

Makes the hosts as network namespaces, each behind a link that is shaped on both ends (needs root, ip, tc, iperf3). One real launch,
`echelon run --hosts` and `echelon join`, in which all numbers of servers alternate, round by round; 0 servers is all-reduce. The
model is nearly all communication. "Limit" is the time of the formula, 2n(n-1)M / ((n² + kn - 2k)B) with iperf3's rate B, before and
after. Leaves a file in benchmarks/results/.
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
from comm_hosts import iperf3, shape

from echelon.ps.shares import link_bytes
from tests.flows.netns import Network

LIMIT_S = 540.0
PORT = 29400


def launch(
    network: Network, asked: argparse.Namespace, folder: Path, script: str = "ps_hosts_worker.py"
) -> dict[str, Any]:
    worker, out = Path(__file__).with_name(script), folder / "times.json"
    first = f"{network.hosts[0].ipv4}:{PORT}"
    env = {**os.environ, "PYTHONPATH": str(record.ROOT), "ECHELON_TOKEN": os.urandom(32).hex(), "OMP_NUM_THREADS": "1"}  # fmt: skip
    echelon = [sys.executable, "-m", "echelon"]
    started = []
    for index, host in enumerate(network.hosts):
        if index == 0:
            words = ["run", "--hosts", str(len(network.hosts)), "--listen", first, "--workers", str(asked.workers),
                     "--servers", str(asked.servers), "--strategy", "ps", "--run-dir", str(folder / "run"), str(worker),
                     str(asked.rounds), str(asked.steps), str(asked.mib), str(out), asked.set]  # fmt: skip
        else:
            words = ["join", first, "--workers", "1" if index < asked.workers else "0"]
        around = env | {"ECHELON_RUNS": str(folder / f"host{index}")}
        said = (folder / f"host{index}.txt").open("w")
        started.append(
            subprocess.Popen(
                host.command(*echelon, *words), env=around, cwd=worker.parent, stdout=said, stderr=said
            )
        )
    try:
        for process in started:
            process.wait(LIMIT_S)
    finally:
        for process in started:
            process.kill()
            process.wait()
    if not out.exists():
        sys.exit((folder / "host0.txt").read_text()[-4000:])
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def report(asked: argparse.Namespace, times: dict[str, list[float]], limit: list[float]) -> dict[str, Any]:
    link, total = statistics.mean(limit), int(asked.mib * (1 << 20))
    spelled = ", ".join(f"{one * 8 / 1e6:.0f}" for one in limit)
    print(
        f"{asked.workers} worker hosts, {asked.rate}, {asked.mib:g} MiB; iperf3 {spelled} Mbit/s; load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'servers':>7} {'ms a step':>10} {'limit ms':>9} {'of limit':>9} {'0 servers /':>12}")
    rows: dict[str, Any] = {"iperf3_bytes_a_second": limit, "load": os.getloadavg()[0]}
    for k, values in times.items():
        ideal = float(link_bytes(asked.workers, int(k), total)) / link
        median = statistics.median(values)
        gain = statistics.median(a / b for a, b in zip(times["0"], values, strict=True))
        rows[f"servers={k}"] = {
            "step_s": median, "limit_s": ideal, "of_limit": ideal / median, "gain": gain, "rounds": values,
        }  # fmt: skip
        print(f"{k:>7} {median * 1e3:>10.1f} {ideal * 1e3:>9.1f} {ideal / median:>9.1%} {gain:>12.3f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=3, help="hosts with one each")
    parser.add_argument("--servers", type=int, default=2, help="hosts with one each")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--mib", type=float, default=50.0, help="of float32 gradients")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="of each side in a round")
    parser.add_argument("--set", default="", help="knobs of the strategy")
    parser.add_argument("--no-file", action="store_true", help="leave nothing in benchmarks/results")
    asked = parser.parse_args()
    network = Network(asked.workers + asked.servers)
    try:
        shape(network, asked.rate)
        limit = [iperf3(network)]
        with tempfile.TemporaryDirectory() as name:
            times = launch(network, asked, Path(name))
        limit.append(iperf3(network))
    finally:
        network.close()
    rows = report(asked, times, limit)
    if not asked.no_file:
        path = record.write(
            f"ps-hosts-{asked.rate}", rows, workers=asked.workers, mib=asked.mib, rate=asked.rate
        )
        print(f"written to {path.relative_to(record.ROOT)}")


if __name__ == "__main__":
    main()
