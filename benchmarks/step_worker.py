"""One worker of the step-time benchmarks: the same model under Echelon and under DDP over gloo, alternating rounds in one process.

Run by `echelon run` with MODEL ROUNDS OUT STRATEGY; rank 0 leaves OUT. Both sides note where each step's time went; with "split" as
the fifth argument OUT tells that too, and how long each side's buckets take on their own.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import echelon
from echelon.clock import Deadline
from echelon.run import Run
from echelon.strategy import Strategy, parse

sys.path.insert(0, str(Path(__file__).parent))
from models import case

ALONE_TRIES = 10
LIMIT_S = 60.0


class Laps:
    """Where the time of a side's steps goes. A gradient's hook runs before whatever sends it, on both sides."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.steps: list[dict[str, float]] = []
        self.at = self.last_gradient = 0.0
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self._gradient)

    def _gradient(self, param: torch.Tensor) -> None:
        self.last_gradient = time.perf_counter()

    def start(self) -> None:
        self.steps.append({})
        self.at = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.steps[-1][name], self.at = now - self.at, now

    def backward(self) -> None:
        """Up to the last gradient it computes; what is left is waiting, and putting in place what came."""
        now = time.perf_counter()
        self.steps[-1] |= {"backward": self.last_gradient - self.at, "exposed": now - self.last_gradient}
        self.at = now


Step = Callable[[], None]


class Side:
    """A model that is trained: `step`, its `laps`, and `alone`, which only moves its buckets."""

    def __init__(self, step: Step, laps: Laps, alone: Step) -> None:
        self.step, self.laps, self.alone = step, laps, alone


def loss_of(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))


def forever(loader: DataLoader[Any], sampler: Any = None) -> Iterator[Any]:
    epoch = 0
    while True:
        if sampler is not None:
            sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def optimizer_for(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.0 if "sparse" in name else 0.9)


def stepper(
    feed: Iterator[Any], model: torch.nn.Module, opt: Any, laps: Laps, log: Callable[..., None]
) -> Step:
    def step() -> None:
        laps.start()
        x, y = next(feed)
        laps.lap("data")
        loss = loss_of(model(x), y)
        laps.lap("forward")
        loss.backward()
        laps.backward()
        opt.step()
        opt.zero_grad()
        log(loss=loss)
        laps.lap("optimizer")

    return step


def ours(first: Run, name: str, batch: int, strategy: Strategy) -> Side:
    run = Run(first.place, strategy, None, first.emit, world=first.world)
    model, data, _, _ = case(name)
    laps = Laps(model)
    model, opt, loader = run.prepare(
        model,
        optimizer_for(name, model),
        DataLoader(data, batch_size=batch * first.world_size, shuffle=True, drop_last=True),
    )

    def alone() -> None:
        sync = run.machine.syncs[0]
        works = [sync.group.all_reduce(bucket.flat) for bucket in sync.buckets]
        for work in works:
            work.wait(Deadline.after(LIMIT_S))

    return Side(stepper(forever(loader), model, opt, laps, run.log), laps, alone)


def theirs(first: Run, name: str, batch: int) -> Side:
    group = dist.new_group(backend="gloo")
    model, data, _, _ = case(name)
    laps = Laps(model)
    ddp = DistributedDataParallel(model, process_group=group)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    feed = forever(DataLoader(data, batch_size=batch, sampler=sampler, drop_last=True), sampler)
    flats: list[torch.Tensor] = []

    def alone() -> None:
        if not flats:
            told = ddp._get_ddp_logging_data()
            sizes = told.get("rebuilt_bucket_sizes") or told["bucket_sizes"]
            flats.extend(torch.zeros(int(size) // 4) for size in str(sizes).split(","))
        works = [dist.all_reduce(flat, group=group, async_op=True) for flat in flats]
        for work in works:
            work.wait()

    return Side(stepper(feed, ddp, optimizer_for(name, model), laps, lambda **values: None), laps, alone)


def timed(step: Step, times: int) -> float:
    """Seconds each."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        step()
    dist.barrier()
    return (time.perf_counter() - began) / times


def split(side: Side, alone: list[float]) -> dict[str, float]:
    """Seconds a step, each a median over steps of the mean over ranks. `exposed` is that of the rank which waited least: it came
    last, so it waits for messages alone; `skew` is what the others waited for it. `alone` is the median of what was measured."""
    everyone: list[list[dict[str, float]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, side.laps.steps)
    steps = []
    for ranks in zip(*everyone, strict=True):
        mean = {name: statistics.mean(of[name] for of in ranks) for name in ranks[0]}
        least = min(of["exposed"] for of in ranks)
        steps.append(mean | {"exposed": least, "skew": mean["exposed"] - least})
    found = {name: statistics.median(of[name] for of in steps) for name in steps[0]}
    return found | {"alone": statistics.median(alone)}


def main() -> None:
    name, rounds, out, strategy = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    first = echelon.init()
    _, _, batch, steps = case(name)
    chosen = Strategy(**{"sync_batchnorm": False, **parse(strategy)})
    sides = {"echelon": ours(first, name, batch, chosen), "ddp": theirs(first, name, batch)}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(3):
        for side in sides.values():
            side.step()
            side.laps.steps.clear()
    for round_ in range(rounds):
        order = list(sides) if round_ % 2 == 0 else list(reversed(sides))
        for which in order:
            times[which].append(timed(sides[which].step, steps))
    found: dict[str, Any] = dict(times)
    if sys.argv[5:] == ["split"]:
        for side in sides.values():
            side.alone()
        alone = {which: [] for which in sides}
        for _ in range(ALONE_TRIES):
            for which, side in sides.items():
                alone[which].append(timed(side.alone, 1))
        found |= {
            "split": {which: split(side, alone[which]) for which, side in sides.items()},
            "threads": torch.get_num_threads(),
        }
    if first.is_main:
        Path(out).write_text(json.dumps(found))


main()
