"""One worker of pipeline_step.py, started by `echelon run` with pipeline=P: the same stages as a run of ours and as PyTorch's own, in turn.

pipeline_step_worker.py FOLDER MODEL ROUNDS LAUNCH; rank 0 leaves FOLDER/times.json.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

import echelon
from echelon.run import Run

sys.path.insert(0, str(Path(__file__).parent))
import models
import turns

ROUND_S = 0.3
SINGLE = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}
SEVERAL = {
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
}


def whole(name: str) -> tuple[nn.Sequential, Tensor, Tensor]:
    """(layers, the batch, its targets); the same on every rank and both sides. Every micro-batch has as many samples."""
    torch.manual_seed(0)
    if name == "heavy":
        return models.bulge(), torch.randn(2048, 16), torch.randint(0, 16, (2048,))
    ids = torch.randint(0, 1000, (16, 33))
    return models.stack(), ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def cuts(layers: int, stages: int) -> list[int]:
    """Where each stage but the first begins: as many layers in each."""
    return [layers * stage // stages for stage in range(1, stages)]


def ours(first: Run, name: str, at: list[int]) -> turns.Step:
    strategy = dataclasses.replace(first.strategy, cut="+".join(map(str, at)))
    run = Run(first.place, strategy, None, first.emit, world=first.world)
    model, x, y = whole(name)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.001))
    return lambda: run.step(turns.mean_loss, (x, y))


def theirs(name: str, at: list[int], schedule: str, micros: int) -> turns.Step:
    """What its documentation shows: stages made by hand, dealt in turn, and a schedule over them."""
    group, device = dist.new_group(backend="gloo"), torch.device("cpu")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, x, y = whole(name)
    ends = [0, *at, len(model)]
    mine = range(rank, len(ends) - 1, size)
    parts = [model[ends[stage] : ends[stage + 1]] for stage in mine]
    stages = [
        pipelining.PipelineStage(part, stage, len(ends) - 1, device, group=group)
        for stage, part in zip(mine, parts, strict=True)
    ]
    if schedule in SINGLE:
        play = SINGLE[schedule](stages[0], micros, loss_fn=turns.mean_loss)
    else:
        play = SEVERAL[schedule](stages, micros, loss_fn=turns.mean_loss)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.001)

    def step() -> Tensor:
        losses: list[Tensor] = []
        given = (x,) if rank == 0 else ()
        if rank == size - 1:
            play.step(*given, target=y, losses=losses, return_outputs=False)
        else:
            play.step(*given)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean() if losses else torch.zeros(())

    return step


def main() -> None:
    folder, name, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    run = echelon.init()
    torch.set_num_threads(1)
    schedule, chunks = (
        run.strategy.schedule,
        run.strategy.chunks if run.strategy.schedule == "interleaved" else 1,
    )
    at = cuts(len(whole(name)[0]), run.world_size * chunks)
    makers: list[tuple[str, Callable[[], turns.Step]]] = [
        ("echelon", lambda: ours(run, name, at)),
        ("gloo", lambda: theirs(name, at, schedule, run.strategy.microbatches)),
    ]
    sides = {side: make() for side, make in (makers if int(sys.argv[4]) % 2 else reversed(makers))}
    losses = {side: [turns.slowest(step().item()) for _ in range(5)] for side, step in sides.items()}
    count = turns.steps_a_round(sides["gloo"], ROUND_S)
    turns.steps_a_round(sides["echelon"], ROUND_S)
    found = turns.in_turn(sides, rounds, count)
    turns.tell(folder, found, steps_a_round=count, same_losses=turns.alike(losses), losses=losses)


main()
