"""Models that are cut into stages: all cells of one world size, in one launch. Started by `echelon run`; each rank writes what it holds.

divided.py OUT [every]   a part of the cells, or all.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon import faults
from echelon.mesh.layout import Placed, Runs
from tests.equality import zoo
from tests.runs import has_servers, run_beside, where_it_lies

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")
MODELS = ("mlp", "cnn", "transformer", "two")
SIZES = (1, 2, 5)
LOST = {
    2: {"pipeline=2,microbatches=2": MODELS},
    4: {
        "data=2,pipeline=2,microbatches=2,schedule=zero-bubble": MODELS,
        "pipeline=3+1,microbatches=5,shares=2:1:1+1": ("cnn", "transformer"),
    },
}
"""In these worlds steps are lost on purpose as well."""
CUTS = {"mlp": "body.1", "cnn": "n2", "transformer": "mix", "two": "middle.2"}
"""Where it is cut by measurement, another run may be cut elsewhere."""
TINY = "wrap_mib=0.0005,data=2"
PARTED = [
    (f"sharded,level=2,{TINY},pipeline=2,microbatches=2", "transformer", "adamw"),
    (f"sharded,level=3,{TINY},pipeline=2,microbatches=2", "transformer", "adamw"),
    (f"sharded,level=3,{TINY},pipeline=2,microbatches=5,schedule=zero-bubble,accumulate=3", "two", "adamw"),
    (f"sharded,level=2,{TINY},pipeline=2,microbatches=5,schedule=gpipe", "mlp", "sgd"),
    (f"sharded,level=3,{TINY},pipeline=2,microbatches=2,schedule=interleaved", "two", "adamw"),
]
"""Replicas of a stage that keep parts of it."""
SERVED = [
    (f"ps,servers_share={share},data=2,pipeline=2,microbatches=2", "transformer", "adamw")
    for share in (1.0, 0.5)
]
"""With parameter servers that sum for the workers of each stage."""


class Two(nn.Module):
    """An encoder of two inputs; the second is needed late, and an early value skips over the middle."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(3, 8)
        self.middle = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x, z):
        x = first = torch.tanh(self.left(x))
        for layer in self.middle:
            x = x + layer(x)
        return self.head(torch.cat([x * first, self.right(z)], dim=-1))


def make(kind):
    if kind != "two":
        return zoo.make(kind)
    torch.manual_seed(3)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(zoo.SAMPLES, 6, generator=g, dtype=zoo.D)
    z = torch.randn(zoo.SAMPLES, 3, generator=g, dtype=zoo.D)
    return Two().to(zoo.D), TensorDataset(x, z, torch.randint(0, 4, (zoo.SAMPLES,), generator=g))


def plain(kind, optimizer, accumulate, microbatches):
    """One process in plain torch with the same cut."""
    if kind != "two":
        return zoo.plain_torch(kind, optimizer, accumulate, microbatches)
    model, dataset = make(kind)
    opt, scheduler, clip = zoo.optimizer_for(optimizer, model, zoo.num_steps(accumulate))
    loader = zoo.loader_for(dataset)
    for _ in range(zoo.EPOCHS):
        batches = list(loader)
        for at in range(0, len(batches), accumulate):
            group = batches[at : at + accumulate]
            total = sum(len(x) for x, _, _ in group)
            for x, z, y in group:
                (zoo.mean_ce(model(x, z), y) * (len(x) / total)).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            if scheduler:
                scheduler.step()
            opt.zero_grad()
    return {k: v.clone() for k, v in model.state_dict().items()}


def cells(workers, every=False):
    """(strategy, model, optimizer) of this many workers: a part in which every pair comes up, or all."""
    if workers == 8:
        return [
            ("data=2,tensor=2,pipeline=2,microbatches=2", kind, "adamw")
            for kind in ("mlp", "transformer", "two")
        ]
    found = []
    kinds = [(schedule, size, kind) for schedule in SCHEDULES for size in SIZES for kind in MODELS]
    for at, (schedule, size, kind) in enumerate(kinds):
        if not every and (workers == 4 or (at + at // 4) % 4 != workers % 4):
            continue  # of four workers those that need four: with other stages than workers, beside parameter servers
        chunks = ",chunks=1" if workers > 2 and schedule == "interleaved" and kind == "mlp" else ""
        text = f"pipeline={workers},microbatches={size},schedule={schedule}{chunks}"
        found.append((text, kind, "adamw" if at % 3 else "sgd"))
    found.append((f"pipeline={workers},microbatches=3,accumulate=3", "transformer", "adamw"))
    uneven = {3: "1+2", 4: "3+1"}.get(workers)
    if uneven:
        for schedule in ("1f1b", "gpipe", "zero-bubble"):
            for kind in ("mlp", "transformer", "two") if every else ("transformer",):
                found.append((f"pipeline={uneven},microbatches=5,schedule={schedule}", kind, "adamw"))
        found.append((f"pipeline={uneven},microbatches=1", "two", "sgd"))
    if workers == 4:
        found.append(("pipeline=2+2,microbatches=5", "transformer", "adamw"))
        found.append(("pipeline=2+2,microbatches=2,schedule=zero-bubble", "mlp", "sgd"))
        found.append(("pipeline=2+1+1,microbatches=5,schedule=gpipe", "transformer", "adamw"))
        found.append(("pipeline=1+3,microbatches=2", "two", "adamw"))
        # BatchNorm: the moments of micro-batches that several workers computed, and replicas that have nothing of some of them
        for text in (
            "pipeline=3+1,microbatches=5",
            "pipeline=2+2,microbatches=2,accumulate=3,schedule=gpipe",
        ):
            found.append((text, "cnn", "adamw"))
        found.append(("data=2,pipeline=2,microbatches=2", "cnn", "sgd"))
        found.append(("data=2,pipeline=2,microbatches=5,schedule=zero-bubble", "cnn", "adamw"))
        found.append(("data=2,pipeline=2,microbatches=2", "transformer", "adamw"))
        for kind in ("mlp", "two"):
            found.append(("data=2,pipeline=2,microbatches=2,accumulate=3,schedule=zero-bubble", kind, "sgd"))
        for kind in ("transformer", "two"):
            found.append(("tensor=2,pipeline=2,microbatches=2", kind, "adamw"))
        found.append(("sharded,level=1,data=2,pipeline=2,microbatches=2", "transformer", "adamw"))
        found.append(("sharded,level=1,data=2,tensor=2", "two", "adamw"))
        found += PARTED
    return found


def train(run, kind, optimizer, lost=()):
    accumulate = run.strategy.accumulate
    model, dataset = make(kind)
    opt, scheduler, clip = zoo.optimizer_for(optimizer, model, zoo.num_steps(accumulate))
    model, opt, loader = run.prepare(model, opt, zoo.loader_for(dataset))
    if scheduler:
        run.prepare(scheduler)
    for step in lost:
        faults.lose(step=step)
    for _ in run.epochs(zoo.EPOCHS):
        for batch in loader:
            inputs = batch[0] if len(batch) == 2 else tuple(batch[:-1])
            run.step(zoo.mean_ce, (inputs, batch[-1]), clip_norm=clip)
            if scheduler:
                scheduler.step()
    assert run.global_step == zoo.num_steps(accumulate), run.global_step
    mine = {}
    places = {n: where_it_lies(run, n, p) for n, p in named(model)}
    for name, tensor in model.state_dict().items():
        placed = places.get(name) or whole(tensor)
        if placed.runs:
            mine[name] = (tensor.clone(), placed)
    return mine


def named(model):
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def whole(tensor):
    return Placed(tuple(tensor.shape), (Runs(0, tensor.numel()),), ())


def part(tensor, placed):
    """What of a whole tensor lies where `placed` says."""
    flat = tensor.reshape(-1)
    rows = [flat[run.start + k * run.period :][: run.length] for run in placed.runs for k in range(run.count)]
    return torch.cat(rows) if rows else flat[:0]


def main():
    torch.set_num_threads(1)
    first = echelon.init()
    results = {}
    if has_servers(first):
        for text, kind, optimizer in SERVED:
            results[text, kind, optimizer] = train(run_beside(first, text), kind, optimizer)
        torch.save(results, Path(sys.argv[1]) / f"rank-{first.rank}.pt")
        return
    for text, kind, optimizer in cells(first.world_size, every=sys.argv[2:] == ["every"]):
        results[text, kind, optimizer] = train(run_beside(first, text), kind, optimizer)
    for name, lost in (("lost", (2, 3, 7)), ("calm", ())):
        results[name] = [
            train(run_beside(first, f"{text},cut={CUTS[kind]}"), kind, "adamw", lost)
            for text, kinds in LOST.get(first.world_size, {}).items()
            for kind in kinds
        ]
    torch.save(results, Path(sys.argv[1]) / f"rank-{first.rank}.pt")


if __name__ == "__main__":
    main()
