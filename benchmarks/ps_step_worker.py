"""A worker of ps_step.py: one model under several strategies, alternating rounds in one process.

Run by `echelon run --servers 2 --strategy ps` with MODEL ROUNDS OUT; rank 0 leaves OUT: seconds a step by strategy, a round each.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.clock import Deadline
from echelon.control import member
from echelon.ps.worker import Servers
from echelon.run import Run
from echelon.strategy import Strategy, parse

sys.path.insert(0, str(Path(__file__).parent))
from models import case

LIMIT_S = 120.0
COPIED = -2
"""Two servers, each with a copy of the other's state."""

SIDES = {
    "allreduce": ("allreduce", 0),
    "ps": ("ps", 2),
    "ps, apply=server, 1 server": ("ps,apply=server", 1),
    "ps, apply=server, 2 servers": ("ps,apply=server", 2),
    "ps, apply=server, replicas=1": ("ps,apply=server", COPIED),
}


class Many(nn.Module):
    """`count` tensors of `numel` elements, with next to no computing: what a step costs beside it."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.zeros(numel)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([p[:2] for p in self.all]).sum(0) * x


def model_for(name: str) -> tuple[nn.Module, Any, int, int]:
    """Model, data, batch of a worker, steps of a round. `tensors-100x250000` are parameters alone."""
    if not name.startswith("tensors-"):
        return case(name)
    count, numel = map(int, name.removeprefix("tensors-").split("x"))
    data = TensorDataset(torch.randn(512, 2), torch.randint(0, 2, (512,)))
    return Many(count, numel), data, 4, 5


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def some(of: Servers, servers: int) -> Servers | None:
    """The first ones of a run's servers; models are numbered across all of them."""
    if servers in (0, len(of)):
        return of if servers else None
    if servers == COPIED:
        mine = member.current()
        assert mine is not None
        chosen = Servers.of_run(mine, 2, replicas=1)
        chosen._models = 9000
        return chosen
    chosen = Servers(of.links[:servers], of.hosts[:servers], of.lanes[:servers])
    chosen._models = 1000 * servers
    return chosen


def stepper(first: Run, name: str, strategy: str, servers: int) -> Callable[[], None]:
    world = dataclasses.replace(first.world, servers=some(first.world.servers, servers))
    fields = {"sync_batchnorm": False, **parse(strategy)}
    run = Run(first.place, Strategy(**fields), None, first.emit, world=world)
    return training(run, *model_for(name)[:3])


def training(run: Run, model: nn.Module, data: Any, batch: int) -> Callable[[], None]:
    """One step of an ordinary script, with `batch` samples a worker, each time it is called."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(data, batch_size=batch * run.world_size, shuffle=True, drop_last=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    feed = forever(loader)

    def step() -> None:
        x, y = next(feed)
        out = model(x)
        F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    name, rounds, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    first = echelon.init()
    sides = {side: stepper(first, name, *how) for side, how in SIDES.items()}
    steps = model_for(name)[3]
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(-1, rounds):  # the first round warms up
        for side in list(sides) if number % 2 else list(reversed(sides)):
            first.world.side.barrier().wait(Deadline.after(LIMIT_S))
            began = time.perf_counter()
            for _ in range(steps):
                sides[side]()
            first.world.side.barrier().wait(Deadline.after(LIMIT_S))
            if number >= 0:
                times[side].append((time.perf_counter() - began) / steps)
    if first.is_main:
        out.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
