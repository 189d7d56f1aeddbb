"""A worker of stragglers.py: one small model under each policy and condition, in one launch.

Run by `echelon run --workers 4 --servers 1 --strategy ps` with SEEDS EPOCHS COST_MS OUT. A sample costs COST_MS of sleep, three times that
where its worker is slow, so that two cores are enough for four workers. Rank 0 leaves OUT: by seed, condition and policy the full loss over time.
"""

from __future__ import annotations

import json
import random
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.run import Run
from echelon.strategy import Strategy, parse

POLICIES = {
    "sync": "ps,apply=server",
    "backup=1": "ps,backup=1",
    "bounded, staleness 4": "ps,update=bounded,staleness=4",
    "async": "ps,update=async",
}
CONDITIONS = ("even", "always", "random")
SAMPLES, BATCH, FEATURES, CLASSES, SLOW = 1024, 32, 16, 4, 3.0


def data(seed: int) -> tuple[Tensor, Tensor]:
    """Classes that a hidden network gives, with some noise."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, FEATURES, generator=g)
    hidden = torch.tanh(x @ torch.randn(FEATURES, 24, generator=g))
    logits = hidden @ torch.randn(24, CLASSES, generator=g) + 0.3 * torch.randn(SAMPLES, CLASSES, generator=g)
    return x, logits.argmax(1)


def is_slow(condition: str, seed: int, step: int, rank: int, workers: int) -> bool:
    if condition == "always":
        return rank == workers - 1
    return condition == "random" and random.Random(seed * 1_000_003 + step).randrange(workers) == rank


def train(
    first: Run, policy: str, condition: str, seed: int, epochs: int, cost_s: float
) -> list[list[float]]:
    """[seconds, loss over all data] as rank 0 saw it; [] elsewhere."""
    run = Run(
        first.place, Strategy(seed=seed, **parse(POLICIES[policy])), None, first.emit, world=first.world
    )
    x, y = data(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), 0.25)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    snaps: list[tuple[float, Tensor]] = []
    run.reduce(0.0, "sum")  # all are here
    began, step = time.perf_counter(), 0
    for _ in range(epochs):
        for inputs, target in loader:
            slow = is_slow(condition, seed, step, run.rank, run.world_size)
            time.sleep(len(inputs) * cost_s * (SLOW if slow else 1.0))
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if run.rank == 0:
                flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
                snaps.append((time.perf_counter() - began, flat))
    run.machine.drain(all_here=True)
    run.reduce(0.0, "sum")
    return [[seconds, _loss(model, flat, x, y)] for seconds, flat in snaps]


@torch.no_grad()
def _loss(model: nn.Module, flat: Tensor, x: Tensor, y: Tensor) -> float:
    at, values = 0, {}
    for name, p in model.named_parameters():
        values[name] = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    return float(F.cross_entropy(torch.func.functional_call(model, values, (x,)), y))


def main() -> None:
    seeds, epochs, cost_ms, out = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    first = echelon.init()
    found: dict[str, dict[str, dict[str, list[list[float]]]]] = {}
    for seed in range(seeds):
        for condition in CONDITIONS:
            for policy in POLICIES:
                curve = train(first, policy, condition, seed, epochs, cost_ms / 1e3)
                found.setdefault(str(seed), {}).setdefault(condition, {})[policy] = curve
        if first.rank == 0:
            out.write_text(json.dumps(found))


main()
