"""The bubble of each schedule, predicted and measured: balanced stages of matrix products, one thread a worker, shared memory.

    python benchmarks/pipeline_bubble.py [--places 4] [--micros 8] [--steps 20] [--width 768] [--rows 256] [--paced | --still]

Every stage has the same number of layers. Gradients of inputs and of weights are made by hand, each one product as long as the
forward's, so that the times are those of the prediction. Equal work takes unequal time on cores that are not equally fast at every moment, and a
pipeline is as fast as the slowest: "unevenness" is how much longer the busiest worker computed than all on average. --paced: every product is
made, and its core kept busy until twice the time of a usual one is over, so that the stages are balanced in time as well. --still: stages wait
as long as their products took instead of computing, for machines with fewer cores than workers. Leaves a file in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import record

from echelon import native
from echelon.clock import Deadline
from echelon.comm import handover
from echelon.comm.over_native import NativeGroup
from echelon.parallel.pipeline.bubble import Times, measured, predicted, simulate
from echelon.parallel.pipeline.contract import Port
from echelon.parallel.pipeline.runtime import Ran, Runtime
from echelon.parallel.pipeline.schedule import Orders, num_stages, plain

LIMIT_S = 300.0


class Products:
    """A Stage of `layers` square products without autograd. `seconds` is what one product takes, if that is not left to the core."""

    def __init__(self, index: int, last: int, layers: int, asked: argparse.Namespace, seconds: float) -> None:
        self.index, self.last, self.rows, self.width = index, last, asked.rows, asked.width
        self.apart, self.seconds, self.still = asked.schedule == "zero-bubble", seconds, asked.still
        self.weight = [torch.randn(asked.width, asked.width) / asked.width**0.5 for _ in range(layers)]
        self.grad = [torch.zeros_like(w) for w in self.weight]
        self.inputs: dict[int, list[Tensor]] = {}
        self.grads: dict[int, list[Tensor]] = {}
        self.first = torch.randn(asked.rows, asked.width)

    def _port(self, source: int) -> list[Port]:
        there = 0 <= source < self.last
        return (
            [Port(source, source, source + 1, (self.rows, self.width), torch.float32, True)] if there else []
        )

    def takes(self, micro: int) -> list[Port]:
        return self._port(self.index - 1)

    def gives(self, micro: int) -> list[Port]:
        return self._port(self.index)

    def product(self, make: Callable[[], Tensor], like: Tensor) -> Tensor:
        if self.still:
            threading.Event().wait(self.seconds)
            return like
        until = time.monotonic() + self.seconds
        made = make()
        while time.monotonic() < until:
            pass
        return made

    def forward(self, micro: int, taken: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        x = next(iter(taken.values()), self.first)
        self.inputs[micro] = []
        for w in self.weight:
            self.inputs[micro].append(x)
            x = self.product(lambda x=x, w=w: x @ w, x)  # type: ignore[misc]
        return {self.index: x}

    def backward(self, micro: int, grads: Mapping[Port, Tensor]) -> Mapping[Port, Tensor]:
        g = next(iter(grads.values()), self.first)
        self.grads[micro] = []
        for w in reversed(self.weight):
            self.grads[micro].insert(0, g)
            g = self.product(lambda g=g, w=w: g @ w.T, g)  # type: ignore[misc]
        if not self.apart:
            self.weights(micro)
        return dict.fromkeys(self.takes(micro), g)

    def weights(self, micro: int) -> None:
        for x, g, grad in zip(self.inputs.pop(micro), self.grads.pop(micro), self.grad, strict=True):
            self.product(lambda x=x, g=g, grad=grad: grad.addmm_(x.T, g), grad)  # type: ignore[misc]

    def drop(self) -> None:
        self.inputs, self.grads = {}, {}


def cores_of(rank: int, size: int) -> set[int]:
    """Neighbouring cores of its own for each worker; all of them where there are too few. It computes with one thread, but must not be held
    to one core: there the thread that moves messages has to wait until the scheduler takes the core from the products."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // size
    return set(cores[rank * each : (rank + 1) * each] if each > 1 else cores)


def work(
    rank: int, fds: list[int], orders: Orders, asked: argparse.Namespace, tell: int, seconds: float
) -> None:
    """One worker: steps from barrier to barrier; tells what it computed and what each step took."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, cores_of(rank, len(orders)))
    core = native.core().ShmGroup(rank, fds[0], fds[1:], 1)
    group = NativeGroup(core, rank, len(orders), torch.device("cpu"))
    mine = sorted({a.stage for a in orders[rank]})
    last = max(a.stage for order in orders for a in order)
    layers = asked.layers * len(orders) // (last + 1)
    stages = {s: Products(s, last, layers, asked, seconds) for s in mine}
    runtime, told = Runtime(group), []
    for step in range(asked.steps + 2):
        group.barrier().wait(Deadline.after(LIMIT_S))
        began = time.monotonic()
        ran = runtime.run(orders, stages, step, Deadline.after(LIMIT_S))
        assert isinstance(ran, Ran), ran
        group.barrier().wait(Deadline.after(LIMIT_S))
        told.append([ran.computed_s, time.monotonic() - began])
    os.write(tell, json.dumps(told[2:]).encode())


def play(asked: argparse.Namespace, seconds: float) -> dict[str, object]:
    """All workers, as processes of their own."""
    size, core = asked.places, native.core()
    orders = plain(asked.schedule, size, asked.micros, asked.chunks)
    fds = [os.memfd_create(f"bubble-{i}") for i in range(size + 1)]
    core.format(fds[0], size, handover.chunk_bytes(size), handover.RING_BYTES, 1)
    for fd in fds[1:]:
        core.reserve(fd, size, handover.chunk_bytes(size), handover.RING_BYTES)
    pipes, pids = [os.pipe() for _ in range(size)], []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                work(rank, fds, orders, asked, pipes[rank][1], seconds)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    told = [json.loads(os.read(reading, 1 << 20)) if not _failed(pid) else None for pid, (reading, _) in zip(pids, pipes, strict=True)]  # fmt: skip
    for fd in [*fds, *(fd for pipe in pipes for fd in pipe)]:
        os.close(fd)
    assert all(told), "a worker failed"
    bubbles = [measured([t[0] for t in step], max(t[1] for t in step)) for step in zip(*told, strict=True)]
    computed = [statistics.median(step[0] for step in each) for each in told if each]
    apart = asked.schedule == "zero-bubble"
    ideal = simulate(orders, Times(1, 1 if apart else 2, 1))
    return {
        "predicted": ideal.bubble,
        "measured": statistics.median(bubbles),
        "quartiles": statistics.quantiles(bubbles, n=4)[::2] if len(bubbles) > 1 else bubbles * 2,
        "step_ms": 1e3 * statistics.median(max(t[1] for t in step) for step in zip(*told, strict=True)),
        "computed_ms": [1e3 * each for each in computed],
        "unevenness": max(computed) / statistics.mean(computed) - 1,
        "alive": max(ideal.alive) * asked.places / num_stages(asked.schedule, asked.places, asked.chunks),
    }


def _failed(pid: int) -> bool:
    return os.waitpid(pid, 0)[1] != 0


def one_product(asked: argparse.Namespace) -> float:
    """Seconds of one, measured before anything is forked."""
    torch.set_num_threads(1)
    x, w = torch.randn(asked.rows, asked.width), torch.randn(asked.width, asked.width)
    taken = []
    for _ in range(20):
        began = time.monotonic()
        x @ w
        taken.append(time.monotonic() - began)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in {"places": 4, "micros": 8, "steps": 20, "width": 768, "rows": 256, "layers": 6, "chunks": 2}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--still", action="store_true")
    kind.add_argument("--paced", action="store_true")
    parser.add_argument("--results", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    seconds = (
        max(one_product(asked), 0.002) if asked.still else 2 * one_product(asked) if asked.paced else 0.0
    )
    formula = predicted(asked.places, asked.micros)
    print(f"{asked.places} workers, {asked.micros} micro-batches: (P-1)/(M+P-1) = {formula:.3f}")
    results: dict[str, object] = {}
    for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble"):
        asked.schedule = schedule
        found = results[schedule] = play(asked, seconds)
        print(
            f"{schedule:12} predicted {found['predicted']:.3f}  measured {found['measured']:.3f}  {found['step_ms']:.1f} ms a step  unevenness {found['unevenness']:.1%}"
        )
    keys = ("places", "micros", "steps", "width", "rows", "layers", "chunks", "still", "paced")
    facts = {key: getattr(asked, key) for key in keys}
    print(
        record.write(
            "pipeline-bubble" + ("-paced" if asked.paced else ""),
            results,
            asked.results,
            formula=formula,
            **facts,
        )
    )


if __name__ == "__main__":
    main()
