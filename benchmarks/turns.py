"""For the workers of a benchmark: the same training by several sides, in turn, in one launch. torch.distributed must be initialised.

Every rank has every side, so that no side's processes wait on a core while another is measured.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], Tensor]
"""One training step; its loss."""


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Step:
    """A plain loop's step."""

    def step() -> Tensor:
        loss = mean_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def slowest(seconds: float) -> float:
    """That of the slowest rank; no rank is told before all have come."""
    return _together(seconds, dist.ReduceOp.MAX)


def _together(number: float, op: dist.ReduceOp.RedOpType) -> float:
    told = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(told, op)
    return float(told)


def steps_a_round(step: Step, round_s: float, most: int = 200) -> int:
    """So many take about round_s; the same on every rank."""
    spent = []
    for _ in range(5):
        began = time.perf_counter()
        step()
        spent.append(time.perf_counter() - began)
    return max(1, min(most, math.ceil(round_s / slowest(statistics.median(spent)))))


@dataclass
class Turns:
    """What each side took for a step, round by round."""

    times: dict[str, list[float]]
    """Seconds, of the slowest rank."""

    busy: dict[str, list[float]]
    """Seconds of processor time, of all ranks and threads together: what other work on the machine changes least."""


def in_turn(sides: Mapping[str, Step], rounds: int, count: int) -> Turns:
    """`count` steps of one side, then of the next, in an order that is drawn anew for each round."""
    found = Turns({side: [] for side in sides}, {side: [] for side in sides})
    order = random.Random(0)
    for _ in range(rounds):
        for side in order.sample(sorted(sides), len(sides)):
            slowest(0.0)
            began, worked = time.perf_counter(), time.process_time()
            for _ in range(count):
                sides[side]()
            took, worked = time.perf_counter() - began, time.process_time() - worked
            found.times[side].append(slowest(took / count))
            found.busy[side].append(_together(worked / count, dist.ReduceOp.SUM))
    return found


def alike(losses: Mapping[str, Sequence[float]], within: float = 1e-4) -> bool:
    """All sides had the same losses."""
    return all(
        math.isclose(min(each), max(each), rel_tol=within) for each in zip(*losses.values(), strict=True)
    )


def tell(folder: Path, found: Turns, **facts: object) -> None:
    """What beside.py reads: rank 0's file."""
    if dist.get_rank() == 0:
        told = {"times": found.times, "busy": found.busy, "threads": torch.get_num_threads(), **facts}
        (folder / "times.json").write_text(json.dumps(told))
