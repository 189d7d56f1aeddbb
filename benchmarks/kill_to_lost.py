"""How soon every other rank of a host knows of a kill -9: from the kill to Lost, naming the killed one.

    python benchmarks/kill_to_lost.py [--kills 25] [--ranks 2,4]

Ranks all-reduce 1 KiB or 1 MiB without a pause, one is killed at a random moment. Leaves a file in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import struct
import sys
import time
from datetime import datetime
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import record

from echelon import native
from echelon.clock import Deadline
from echelon.comm import handover
from echelon.comm.group import Lost
from echelon.comm.over_native import NativeGroup

TOLD = struct.Struct("dq")


def reduce_until_lost(rank: int, fds: list[int], num_bytes: int, tell: int) -> None:
    torch.set_num_threads(1)
    core = native.core().ShmGroup(rank, fds[0], fds[1:], 1)
    group, x = NativeGroup(core, rank, len(fds) - 1, torch.device("cpu")), torch.zeros(num_bytes // 4)
    while True:
        outcome = group.all_reduce(x).wait(Deadline.after(60))
        if isinstance(outcome, Lost):
            os.write(tell, TOLD.pack(time.monotonic(), outcome.peers[0] if outcome.peers else -1))
            return


def game(size: int, draw: random.Random) -> list[float]:
    """Seconds from the kill to Lost, a survivor."""
    core, chunk, ring = native.core(), handover.chunk_bytes(size), handover.RING_BYTES
    fds = [os.memfd_create(f"kill-{i}") for i in range(size + 1)]
    core.format(fds[0], size, chunk, ring, 1)
    for fd in fds[1:]:
        core.reserve(fd, size, chunk, ring)
    reading, writing = os.pipe()
    num_bytes, victim, pids = draw.choice((1 << 10, 1 << 20)), draw.randrange(size), []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            try:
                reduce_until_lost(rank, fds, num_bytes, writing)
            finally:
                os._exit(0)
        pids.append(pid)
    os.close(writing)
    time.sleep(draw.uniform(0.3, 0.6))
    killed = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    told = os.read(reading, 4096)
    for fd in [*fds, reading]:
        os.close(fd)
    losses = [TOLD.unpack_from(told, at) for at in range(0, len(told), TOLD.size)]
    assert len(losses) == size - 1, losses
    assert all(peer == victim for _, peer in losses), (victim, losses)
    return [at - killed for at, _ in losses]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--ranks", default="2,4")
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6)
    draw, found = random.Random(seed), {}
    for size in map(int, asked.ranks.split(",")):
        times = sorted(t for _ in range(asked.kills) for t in game(size, draw))
        found[size] = {"median_s": statistics.median(times), "worst_s": times[-1], "survivors": len(times)}
        print(
            f"{size} ranks, {asked.kills} kills: median {statistics.median(times) * 1e3:.0f} ms, worst {times[-1] * 1e3:.0f} ms"
        )
    name = f"{datetime.now():%Y-%m-%d}-kill-to-lost-{record.cores()}cores.json"
    (record.ROOT / "benchmarks" / "results" / name).write_text(
        json.dumps({"seed": seed, "cores": record.cores(), "kills": asked.kills, "results": found}, indent=1)
        + "\n"
    )


if __name__ == "__main__":
    main()
