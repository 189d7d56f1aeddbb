"""Models of `with run.build():` under forms that split them: start weights bit-equal to plain construction, and the same training.

built.py OUT   each rank writes, by mesh and optimizer, how far it ended from plain torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon.parallel.building import recipe
from echelon.parallel.local import local
from tests.equality.shared import Runs
from tests.equality.split_zoo import GPT
from tests.equality.zoo import mean_ce
from tests.runs import averages, where_it_lies

CELLS = {
    2: (("sharded,wrap_mib=0.001", "adamw"), ("sharded", "adagrad"), ("sharded,level=2", "adamw"), ("sharded,level=1", "adamw"),
        ("tensor=2", "adamw"), ("tensor=2", "adagrad"), ("pipeline=2,microbatches=2", "adamw")),
    4: (("sharded,wrap_mib=0.001", "adagrad"), ("sharded,shard_workers=2", "adamw"), ("data=2,tensor=2", "adamw"),
        ("tensor=2,pipeline=2,microbatches=2", "adagrad")),
}  # fmt: skip
"""By workers: (mesh, optimizer)."""
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
}
"""Adagrad has state from the beginning on."""
EMA = 0.5


class Net(nn.Module):
    """Everything that makes weights another way: custom initialisation, a tied table, a buffer, a part in another order."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(11, 4, bias=False)
        self.gpt = GPT(width=16, heads=4)
        for name, param in self.gpt.named_parameters():
            if "qkv" in name:
                nn.init.trunc_normal_(param, std=0.3)
            elif "down.weight" in name:
                nn.init.orthogonal_(param)
                param.data.mul_(0.7)
        with torch.no_grad():
            self.last.weight.copy_(torch.randn(11, 4).t() / 3)
        self.register_buffer("shift", torch.rand(11))
        self.double()
        self.last.weight.mark = "the script's own"

    def forward(self, ids):
        return self.last(self.gpt(ids).mean(1) + self.shift)


def data():
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(0, 11, (12, 5), generator=g), torch.randint(0, 4, (12,), generator=g))


def seeded():
    torch.manual_seed(7)


def plain(kind):
    """(start, end, average, the next random number)"""
    seeded()
    model = Net()
    after = torch.rand(1)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = OPTIMIZERS[kind](model.parameters())
    average = {k: v.detach().clone() for k, v in model.named_parameters()}
    for x, y in DataLoader(data(), batch_size=6):
        mean_ce(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, param in model.named_parameters():
            average[name].lerp_(param.detach(), 1 - EMA)
    return start, model.state_dict(), average, after


def part(run, name, tensor, whole):
    """What this rank should have of a whole tensor."""
    placed = where_it_lies(run, name, tensor)
    if placed is None:
        return whole
    places = [
        r.start + n * r.period + i for r in placed.runs for n in range(r.count) for i in range(r.length)
    ]
    return whole.reshape(-1)[torch.tensor(places, dtype=torch.int64)]


def cell(run, kind):
    start, end, average, after = plain(kind)
    seeded()
    with run.build():
        model = Net()
    assert torch.equal(torch.rand(1), after), "the random stream goes on as it would have"
    assert recipe.is_recorded(model) == run.strategy.splits_model
    optimizer = OPTIMIZERS[kind](model.parameters())
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data(), batch_size=6))
    assert not recipe.is_recorded(model)
    assert model.last.weight.mark == "the script's own"
    assert model.gpt.out.weight is model.gpt.embed.weight
    state = [t for s in optimizer.state.values() for t in s.values()]
    assert all(recipe.recorder_of(t) is None for t in state), "the optimizer's state is made as well"
    pairs = list(model.state_dict(keep_vars=True).items())
    if run.strategy.stages == 1:
        for name, tensor in pairs:
            mine = local(tensor.detach()).reshape(-1)
            assert torch.equal(mine, part(run, name, tensor, start[name]).reshape(-1)), (
                f"{name} starts otherwise"
            )
    for batch in loader:
        run.step(mean_ce, batch)
    ends = [
        (t.detach(), part(run, name, t, end[name])) for name, t in model.state_dict(keep_vars=True).items()
    ]
    shadows = averages(run, model)
    names = {id(p): name for name, p in model.named_parameters()}
    ends += [(shadow, part(run, names[id(p)], p, average[names[id(p)]])) for p, shadow in shadows]
    assert len(shadows) == sum(part(run, n, p, average[n]).numel() > 0 for n, p in model.named_parameters())
    return max(
        (
            float((local(mine).reshape(-1) - wanted.reshape(-1)).abs().max())
            for mine, wanted in ends
            if wanted.numel()
        ),
        default=0.0,
    )


def main():
    torch.set_num_threads(1)
    first = echelon.init()
    runs = Runs(first, Path(sys.argv[1]))
    said = {}
    for mesh, kind in CELLS[first.world_size]:
        said[mesh, kind] = cell(runs.make(mesh, ema=EMA), kind)
    torch.save(said, Path(sys.argv[1]) / f"rank-{first.rank}.pt")


if __name__ == "__main__":
    main()
