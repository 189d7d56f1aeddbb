"""All cells of one launch, one after the other. train.py OUT LAUNCH, started by `echelon run`; leaves a checkpoint of each cell's end."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon import faults
from echelon.parallel import sums
from tests.equality import divided, shared_zoo, split_zoo, zoo
from tests.equality.shared import Runs
from tests.exact.cells import LAUNCHES, Cell
from tests.runs import finish_saving, lost_steps, values_come_behind

sums.LEAST_BYTES = 0
values_come_behind()
"""What only larger models and other hosts would do is done by small ones on one host."""

MODELS = {
    "mlp": zoo.make,
    "cnn": zoo.make,
    "transformer": zoo.make,
    "table": zoo.make,
    "gpt": split_zoo.make,
    "heads": lambda _: shared_zoo.make("gpt"),
    "two": shared_zoo.make,
    "two stages": lambda _: divided.make("two"),
}


def made(cell: Cell):
    """(model, dataset) in the cell's type."""
    model, dataset = MODELS[cell.model](cell.model)
    dtype = getattr(torch, cell.dtype)
    tensors = [x.to(dtype) if x.is_floating_point() else x for x in dataset.tensors]
    return model.to(dtype), TensorDataset(*tensors)


def optimizer_for(name: str, model, steps: int):
    """(optimizer, scheduler or None)"""
    params = [p for p in model.parameters() if p.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01), None
    if name == "adamw":
        optimizer = torch.optim.AdamW(params, lr=0.02, eps=1e-5)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    if name == "adam":
        return torch.optim.Adam(params, lr=0.01, eps=1e-5, amsgrad=True), None
    if name == "rmsprop":
        return torch.optim.RMSprop(params, lr=0.005, momentum=0.5, centered=True), None
    return torch.optim.Adagrad(params, lr=0.1), None


def train(run, cell: Cell) -> None:
    model, dataset = made(cell)
    optimizer, scheduler = optimizer_for(cell.optimizer, model, zoo.num_steps(run.strategy.accumulate))
    model, optimizer, loader = run.prepare(model, optimizer, zoo.loader_for(dataset))
    if scheduler:
        run.prepare(scheduler)
    for step in cell.lost:
        faults.lose(step=step)
    for _ in run.epochs(zoo.EPOCHS):
        for batch in loader:
            inputs, target = shared_zoo.inputs(batch)
            if cell.stepped:
                run.step(zoo.mean_ce, (inputs, target), clip_norm=cell.clip)
            else:
                zoo.mean_ce(model(*inputs), target).backward()
                if cell.clip:
                    run.clip_grad_norm(model, cell.clip)
                optimizer.step()
                optimizer.zero_grad()
            if scheduler:
                scheduler.step()
    assert lost_steps(run) == len(cell.lost), lost_steps(run)
    run.checkpoint().wait()
    finish_saving(run)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    out, launch, first = Path(sys.argv[1]), LAUNCHES[sys.argv[2]], echelon.init()
    runs = Runs(first, out)
    for cell in launch.cells:
        train(runs.make(cell.strategy, cell.name), cell)


if __name__ == "__main__":
    main()
