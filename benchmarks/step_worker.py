"""One worker of the step-time benchmark: the same model under Echelon and under DDP, alternating rounds in one process."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import echelon
from echelon.run import Run
from echelon.strategy import Strategy, parse

sys.path.insert(0, str(Path(__file__).parent))
from models import case


def loss_of(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))


def forever(loader, sampler=None):
    epoch = 0
    while True:
        if sampler is not None:
            sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def optimizer_for(name, model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.0 if "sparse" in name else 0.9)


def ours(first: Run, name: str, batch: int, strategy: Strategy):
    run = Run(first.place, strategy, None, first.emit, world=first.world)
    model, data, _, _ = case(name)
    model, opt, loader = run.prepare(
        model,
        optimizer_for(name, model),
        DataLoader(data, batch_size=batch * first.world_size, shuffle=True, drop_last=True),
    )
    feed = forever(loader)

    def step() -> None:
        x, y = next(feed)
        loss = loss_of(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.log(loss=loss)

    return step


def theirs(first: Run, name: str, batch: int):
    model, data, _, _ = case(name)
    model = DistributedDataParallel(model)
    opt = optimizer_for(name, model)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    feed = forever(DataLoader(data, batch_size=batch, sampler=sampler, drop_last=True), sampler)

    def step() -> None:
        x, y = next(feed)
        loss = loss_of(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()

    return step


def main() -> None:
    name, rounds, out, strategy = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    first = echelon.init()
    _, _, batch, steps = case(name)
    chosen = Strategy(**{"sync_batchnorm": False, **parse(strategy)})
    sides = {"echelon": ours(first, name, batch, chosen), "ddp": theirs(first, name, batch)}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(3):
        for step in sides.values():
            step()
    for round_ in range(rounds):
        order = list(sides) if round_ % 2 == 0 else list(reversed(sides))
        for side in order:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                sides[side]()
            dist.barrier()
            times[side].append((time.perf_counter() - began) / steps)
    if first.is_main:
        Path(out).write_text(json.dumps(times))


main()
