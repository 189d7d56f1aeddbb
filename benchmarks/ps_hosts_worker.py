"""A worker of ps_hosts.py: steps of a model that is nearly all communication, with 0, 1, 2, … servers in turn, in one launch.

Run by `echelon run --servers K --strategy ps` with ROUNDS STEPS MIB OUT; rank 0 leaves OUT: seconds a step by number of servers, a
round each.
"""

from __future__ import annotations

import dataclasses
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
from ps_step_worker import some

LIMIT_S = 120.0


def main() -> None:
    rounds, steps, mib, out = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    first = echelon.init()
    knobs = sys.argv[5] if len(sys.argv) > 5 else ""
    sides = {}
    for k in range(len(first.world.servers) + 1):
        world = dataclasses.replace(first.world, servers=some(first.world.servers, k))
        sides[k] = Side(first, Strategy(**parse("ps" if k else "allreduce"), **parse(knobs)), mib, world)
    side = first.world.side
    times: dict[int, list[float]] = {k: [] for k in sides}
    for number in range(-1, rounds):  # the first round warms up
        for k in list(sides) if number % 2 else list(reversed(sides)):
            side.barrier().wait(Deadline.after(LIMIT_S))
            began = time.perf_counter()
            for _ in range(steps):
                sides[k].step()
            side.barrier().wait(Deadline.after(LIMIT_S))
            if number >= 0:
                times[k].append((time.perf_counter() - began) / steps)
    if first.is_main:
        out.write_text(json.dumps(times))


main()
