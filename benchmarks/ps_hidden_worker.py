"""A worker of ps_hidden.py: one model twice, with values that step() waits for and with values that come behind the next forward.

Run by `echelon run --servers K --strategy ps` with ROUNDS STEPS - OUT MODEL; rank 0 leaves OUT: seconds a step by side, a round each.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import echelon
from echelon.clock import Deadline
from echelon.parallel import arriving
from echelon.parallel.pushpull import PushSync
from echelon.run import Run
from echelon.strategy import Strategy

sys.path.insert(0, str(Path(__file__).parent))
from ps_step_worker import model_for, training

LIMIT_S = 300.0


class Slow(torch.autograd.Function):
    """Takes some time in forward and twice that in backward, on no core: in place of an accelerator."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return grad, None


class Layers(nn.Module):
    """`slow-12x1000000x30`: 12 layers of a million parameters, 30 ms each."""

    def __init__(self, count: int, numel: int, seconds: float) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.zeros(numel)) for _ in range(count)])
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for p in self.all:
            x = Slow.apply(x + p[:2], self.seconds)
        return x


def made(name: str) -> tuple[nn.Module, Any, int]:
    """Model, data, batch of a worker."""
    if name.startswith("slow-"):
        count, numel, ms = map(int, name.removeprefix("slow-").split("x"))
        data = TensorDataset(torch.randn(512, 2), torch.randint(0, 2, (512,)))
        return Layers(count, numel, ms / 1e3), data, 4
    name, _, given = name.partition("@")
    model, data, batch, _ = model_for(name)
    return model, data, int(given or batch)


def stepper(first: Run, name: str, hides: bool) -> Callable[[], None]:
    strategy = Strategy(form="ps", apply="server", sync_batchnorm=False)
    run = Run(first.place, strategy, None, first.emit, world=first.world)
    step = training(run, *made(name))
    (sync,) = run.machine.syncs
    assert isinstance(sync, PushSync)
    sync.arrivals.wanted = hides
    return step


def main() -> None:
    rounds, steps, out, name = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4]), sys.argv[5]
    torch.set_num_threads(1)
    arriving.LOCAL = True
    arriving.WORTH_BYTES = 0
    first = echelon.init()
    sides = {"waited": stepper(first, name, False), "hidden": stepper(first, name, True)}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(-1, rounds):  # the first round warms up
        for side in list(sides) if number % 2 else list(reversed(sides)):
            first.world.side.barrier().wait(Deadline.after(LIMIT_S))
            began = time.perf_counter()
            for _ in range(steps):
                sides[side]()
            arriving.settle()
            first.world.side.barrier().wait(Deadline.after(LIMIT_S))
            if number >= 0:
                times[side].append((time.perf_counter() - began) / steps)
    if first.is_main:
        out.write_text(json.dumps(times))


main()
