"""Columns of a table on three workers: all cells in one launch. Started by `echelon run --strategy tensor=3`.

vertical.py OUT   rank 0 writes what was said to OUT/said.json; each cell's model lies in OUT/<cell>.safetensors.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon import faults
from echelon.errors import EchelonError
from echelon.strategy import merge, parse
from tests.equality import zoo
from tests.runs import group_of, run_beside

OF = ["a", "b", "c", "d", "e", "f"]
LOST = (2, 3, 7)


@dataclass(frozen=True)
class Cell:
    """Who has what, and what is trained on it."""

    columns: tuple[tuple[int, ...], ...]
    owner: int
    strategy: str = ""
    optimizer: str = "adamw"
    model: str = "plain"

    @property
    def accumulate(self):
        return merge(parse(self.strategy)).accumulate

    @property
    def ema(self):
        return merge(parse(self.strategy)).ema


CELLS = {
    "stretches": Cell(((0, 1, 2), (3, 4), (5,)), 0),
    "woven": Cell(((0, 3), (1, 4, 5), (2,)), 2, "accumulate=2", "sgd", "norm"),
    "labels-only": Cell(((0, 1, 2, 5), (), (3, 4)), 1, "microbatches=2,ema=0.8"),
    "frozen": Cell(((4, 0), (2,), (5, 3, 1)), 0, "", "adamw", "frozen"),
}


class Frozen(nn.Module):
    """Its first layer is not the first that was made, and not trained."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.first = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        return self.body(self.first(x))


def make(kind):
    torch.manual_seed(3)
    if kind == "norm":
        layers = [nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)]
        return nn.Sequential(*layers).to(zoo.D)
    return (Frozen() if kind == "frozen" else nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))).to(
        zoo.D
    )


def table():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(zoo.SAMPLES, 6, generator=g, dtype=zoo.D)
    return x, torch.randn(zoo.SAMPLES, 3, generator=g, dtype=zoo.D)


def loader_for(dataset):
    return DataLoader(dataset, zoo.BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))


def judge(model, batch):
    x, y = batch
    return {"loss": (F.mse_loss(model(x), y, reduction="sum"), 3 * len(x))}


def plain(cell):
    """One process in plain torch with all columns: the weights (averaged ones where they are asked for), and the loss over all rows."""
    model, (x, y) = make(cell.model), table()
    averages = [p.detach().clone() for p in model.parameters()]
    opt, scheduler, clip = zoo.optimizer_for(cell.optimizer, model, zoo.num_steps(cell.accumulate))
    loader = loader_for(TensorDataset(x, y))
    for _ in range(zoo.EPOCHS):
        batches = list(loader)
        for at in range(0, len(batches), cell.accumulate):
            group = batches[at : at + cell.accumulate]
            total = sum(len(x) for x, _ in group)
            for rows, target in group:
                (F.mse_loss(model(rows), target) * (len(rows) / total)).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            if scheduler:
                scheduler.step()
            opt.zero_grad()
            for average, param in zip(averages, model.parameters(), strict=True):
                average.lerp_(param.detach(), 1 - cell.ema)
    if cell.ema:
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(averages), model.parameters())
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    total, count = judge(model.eval(), (x, y))["loss"]
    return weights, total.item() / count


class Sent:
    """Notes every byte that this process gives to a group."""

    def __init__(self, kind):
        self.found, self.kind, self.kept = [], kind, {}

    def __enter__(self):
        for name in ("send", "all_reduce", "broadcast", "all_gather", "gather", "reduce", "all_to_all"):
            self.kept[name] = inner = getattr(self.kind, name)
            setattr(self.kind, name, self._noting(name, inner))
        return self

    def __exit__(self, *error):
        for name, inner in self.kept.items():
            setattr(self.kind, name, inner)

    def _noting(self, name, inner):
        def noting(group, *args, **kwargs):
            x = args[1] if name in ("all_gather", "gather", "all_to_all") else args[0]
            if name != "broadcast" or (args[1] if len(args) > 1 else kwargs.get("root", 0)) == group.rank:
                self.found.append((tuple(x.shape), x.detach().contiguous().view(torch.uint8).numpy().tobytes()
                                   if x.numel() and x.dim() else b""))  # fmt: skip
            return inner(group, *args, **kwargs)

        return noting

    def of(self, values):
        """How many of these numbers were sent as they are."""
        everything = b"|".join(data for _, data in self.found)
        return sum(bytes(row.view(torch.uint8).tolist()) in everything for row in values.reshape(-1, 1))


def columns_of(cell, rank, rows=zoo.SAMPLES):
    x, y = table()
    mine = list(cell.columns[rank])
    target = y[:rows] if rank == cell.owner else None
    return echelon.Columns(x[:rows, mine], [OF[i] for i in mine], OF, target=target)


def train(run, cell, lost=()):
    model = make(cell.model)
    opt, scheduler, clip = zoo.optimizer_for(cell.optimizer, model, zoo.num_steps(cell.accumulate))
    columns = columns_of(cell, run.rank)
    model, opt, loader = run.prepare(model, opt, loader_for(columns))
    if scheduler:
        run.prepare(scheduler)
    for step in lost:
        faults.lose(step=step)
    for _ in run.epochs(zoo.EPOCHS):
        for batch in loader:
            loss = run.step(F.mse_loss, batch, clip_norm=clip)
            if scheduler:
                scheduler.step()
    assert run.global_step == zoo.num_steps(cell.accumulate), run.global_step
    return model, run.evaluate(model, DataLoader(columns, 4), judge)["loss"], loss


def refused(act):
    """What was said where something is refused, on this rank."""
    try:
        act()
    except EchelonError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(first):
    rank, cell = first.rank, CELLS["stretches"]
    text = "tensor=3"

    def rows_differ():
        run = run_beside(first, text)
        run.prepare(make("plain"), loader_for(columns_of(cell, rank, zoo.SAMPLES - (rank == 1))))

    def no_axis():
        run_beside(first, "allreduce").prepare(make("plain"), loader_for(columns_of(cell, rank)))

    def too_late():
        run = run_beside(first, text)
        run.prepare(make("plain"))
        run.prepare(loader_for(columns_of(cell, rank)))

    def plain_loop():
        run = run_beside(first, text)
        model, loader = run.prepare(make("plain"), loader_for(columns_of(cell, rank)))
        for x, _ in loader:
            model(x)

    def no_first_layer():
        model = nn.Sequential(nn.Tanh(), nn.Linear(6, 3)).to(zoo.D)
        run_beside(first, text).prepare(model, loader_for(columns_of(cell, rank)))

    def lbfgs():
        model = make("plain")
        opt = torch.optim.LBFGS(model.parameters())
        run_beside(first, text).prepare(model, opt, loader_for(columns_of(cell, rank)))

    return {
        act.__name__: refused(act)
        for act in (rows_differ, no_axis, too_late, plain_loop, no_first_layer, lbfgs)
    }


def main():
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    first = echelon.init()
    said = {}
    for name, cell in CELLS.items():
        with Sent(type(group_of(first, "tensor"))) as sent:
            run = run_beside(first, ",".join(filter(None, ("tensor=3", cell.strategy))))
            model, loss, last = train(run, cell)
            x, y = table()
            said[name] = {
                "loss": loss,
                "last": last.item(),
                "leaked": [sent.of(x[:, list(cell.columns[run.rank])]), sent.of(y)],
                "first weights": sent.of(next(make(cell.model).parameters()).detach()),
                "shapes": sorted({str(shape) for shape, _ in sent.found}),
                "nan": sum(bool(torch.isnan(p).any()) for p in model.parameters()),
            }
        run.save(out / name)
    run = run_beside(first, "tensor=3")
    train(run, CELLS["stretches"], LOST)
    run.save(out / "lost")
    said["refused"] = refusals(first)
    (out / f"said-{first.rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
