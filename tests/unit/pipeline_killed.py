"""A pipe of real processes over shared memory, one of which is killed in the middle of a step: what the others get, as JSON lines."""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from echelon import native
from echelon.clock import Deadline
from echelon.comm import handover
from echelon.comm.group import Lost
from echelon.comm.over_native import NativeGroup
from echelon.parallel.pipeline import replicas
from echelon.parallel.pipeline.contract import Action
from echelon.parallel.pipeline.runtime import Runtime
from tests.unit.pipeline_parts import Net, batch, workers

WIDTHS, MICROS, VICTIM, STEP = (1, 1, 2), 6, 1, 3


def work(rank: int, fds: list[int]) -> dict[str, object]:
    torch.set_num_threads(1)
    size = sum(WIDTHS)
    group = NativeGroup(native.core().ShmGroup(rank, fds[0], fds[1:], 1), rank, size, torch.device("cpu"))
    orders = replicas.orders("1f1b", WIDTHS, MICROS)
    stages = workers(Net(len(WIDTHS)), orders, batch(MICROS, rows=400))[rank]
    runtime, step = Runtime(group), 0

    def before(action: Action) -> None:
        if (rank, step, action) == (VICTIM, STEP, Action("backward", 1, 2)):
            os.kill(os.getpid(), signal.SIGKILL)

    for step in range(STEP + 2):
        began = time.monotonic()
        outcome = runtime.run(orders, stages, step, Deadline.after(60), before)
        if isinstance(outcome, Lost):
            break
    stage = next(iter(stages.values()))
    return {
        "lost": isinstance(outcome, Lost),
        "peers": getattr(outcome, "peers", None),
        "step": step,
        "seconds": time.monotonic() - began,
        "kept": len(stage.kept),
    }


def main() -> None:
    size, core = sum(WIDTHS), native.core()
    fds = [os.memfd_create(f"pipe-{i}") for i in range(size + 1)]
    core.format(fds[0], size, handover.chunk_bytes(size), handover.RING_BYTES, 1)
    for fd in fds[1:]:
        core.reserve(fd, size, handover.chunk_bytes(size), handover.RING_BYTES)
    reading, writing = os.pipe()
    pids = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            try:
                os.write(writing, (json.dumps(work(rank, fds)) + "\n").encode())
            finally:
                os._exit(0)
        pids.append(pid)
    os.close(writing)
    for pid in pids:
        os.waitpid(pid, 0)
    sys.stdout.buffer.write(os.read(reading, 1 << 16))


if __name__ == "__main__":
    main()
