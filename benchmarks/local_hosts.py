"""Copies that meet every k steps (update=local) beside all-reduce, among hosts: bytes a step of a worker's link, and time.

    python benchmarks/local_hosts.py [--workers 3] [--servers 1] [--rate 200mbit] [--mib 4] [--rounds 4] [--steps 16]

Hosts are network namespaces with shaped links, as in ps_hosts.py; one launch, in which the sides alternate. The model is nearly all
communication. Bytes are the kernel's counters of worker 0's link, both ways. Leaves a file in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import record
from comm_hosts import shape
from ps_hosts import launch

from tests.flows.netns import Network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=3, help="hosts with one each")
    parser.add_argument("--servers", type=int, default=1, help="hosts with one each")
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--mib", type=float, default=4.0, help="of float32 parameters")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16, help="of each side in a round: a multiple of 16")
    parser.add_argument("--no-file", action="store_true", help="leave nothing in benchmarks/results")
    asked = parser.parse_args()
    asked.set = ""
    network = Network(asked.workers + asked.servers)
    try:
        shape(network, asked.rate)
        with tempfile.TemporaryDirectory() as name:
            found = launch(network, asked, Path(name), "local_hosts_worker.py")
    finally:
        network.close()
    rows: dict[str, Any] = {"load": os.getloadavg()[0]}
    print(
        f"{asked.workers} worker hosts, {asked.servers} server hosts, {asked.rate}, {asked.mib:g} MiB; load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'side':28} {'MB a step':>10} {'of all-reduce':>14} {'ms a step':>10}")
    for side, measured in found.items():
        sent, seconds = (statistics.median(measured[what]) for what in ("bytes", "seconds"))
        share = sent / statistics.median(found["allreduce"]["bytes"])
        rows[side] = {"bytes": sent, "of_allreduce": share, "step_s": seconds, **measured}
        print(f"{side:28} {sent / 1e6:10.3f} {share:14.3f} {seconds * 1e3:10.1f}")
    if not asked.no_file:
        given = {"workers": asked.workers, "servers": asked.servers, "mib": asked.mib, "rate": asked.rate}
        path = record.write(f"local-hosts-{asked.rate}", rows, **given)
        print(f"written to {path.relative_to(record.ROOT)}")


if __name__ == "__main__":
    main()
