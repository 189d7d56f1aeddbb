"""A worker of local_hosts.py. Run by `echelon run --servers K --strategy ps` with ROUNDS STEPS MIB OUT; rank 0 leaves OUT."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

import echelon
from echelon.clock import Deadline
from echelon.strategy import Strategy, parse

sys.path.insert(0, str(Path(__file__).parent))
from ps_hosts_models import Side

LIMIT_S = 120.0
SIDES = ("allreduce", *(f"ps,update=local,local_steps={k}" for k in (1, 4, 16)))


def link_bytes() -> int:
    """Both ways, of this host's link."""
    (line,) = [x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip().startswith("eth0:")]
    words = line.split(":")[1].split()
    return int(words[0]) + int(words[8])


def main() -> None:
    rounds, steps, mib, out = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    first = echelon.init()
    sides = {name: Side(first, Strategy(**parse(name)), mib) for name in SIDES}
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "bytes": []} for name in SIDES}
    for number in range(-1, rounds):  # the first round warms up
        for name in SIDES if number % 2 else reversed(SIDES):
            first.world.side.barrier().wait(Deadline.after(LIMIT_S))
            began, before = time.perf_counter(), link_bytes()
            for _ in range(steps):
                sides[name].step()
            first.world.side.barrier().wait(Deadline.after(LIMIT_S))
            if number >= 0:
                found[name]["seconds"].append((time.perf_counter() - began) / steps)
                found[name]["bytes"].append((link_bytes() - before) / steps)
    if first.is_main:
        out.write_text(json.dumps(found))


main()
