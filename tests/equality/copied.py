"""Loops under update=local, in one launch: what each rank ends with, and which samples it took. Started by `echelon run --servers`.

Writes results by (form, case), and for features only with one worker, where all of it is one process in plain torch.
"""

import sys
import traceback
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon.errors import EchelonError
from echelon.strategy import Strategy
from tests.equality import features, scripts, zoo  # noqa: F401  scripts adds to FEATURES
from tests.runs import committed_samples, note_samples, run_beside

FORMS = {
    "mean-1": {"local_steps": 1},
    "mean-2": {"local_steps": 2},
    "diloco-1": {"local_steps": 1, "outer": "diloco"},
    "diloco-2": {"local_steps": 2, "outer": "diloco", "outer_lr": 0.5, "outer_momentum": 0.8},
    "geo-2": {"local_steps": 2, "outer": "geo"},
}
EPOCHS = 3


def bare_sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.01)


def optimizer_for(name, model):
    return bare_sgd(model) if name == "bare" else zoo.optimizer_for(name, model, 10)[0]


def cell(first, form, kind, optimizer, accumulate=1):
    strategy = Strategy(form="ps", update="local", accumulate=accumulate, **FORMS[form])
    run = run_beside(first, strategy)
    model, dataset = zoo.make(kind)
    model, opt, loader = run.prepare(model, optimizer_for(optimizer, model), zoo.loader_for(dataset))
    note_samples(loader)
    for _ in run.epochs(EPOCHS):
        for x, y in loader:
            zoo.mean_ce(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    return {k: v.clone() for k, v in model.state_dict().items()}, committed_samples(loader)


def whole(first, case):
    """A cell of the matrix, with its clipping and its scheduler."""
    kind, optimizer, accumulate, microbatches = case
    strategy = Strategy(
        form="ps", update="local", local_steps=2, accumulate=accumulate, microbatches=microbatches
    )
    run = run_beside(first, strategy)
    model, dataset = zoo.make(kind)
    opt, scheduler, clip = zoo.optimizer_for(optimizer, model, zoo.num_steps(accumulate))
    model, opt, loader = run.prepare(model, opt, zoo.loader_for(dataset))
    if scheduler:
        run.prepare(scheduler)
    for _ in run.epochs(zoo.EPOCHS):
        for x, y in loader:
            zoo.mean_ce(model(x), y).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            if scheduler:
                scheduler.step()
            opt.zero_grad()
    return {k: v.clone() for k, v in model.state_dict().items()}


def feature(first, name):
    strategy = Strategy(form="ps", update="local", local_steps=2)
    return features.FEATURES[name](run_beside(first, strategy))


def tried(act):
    try:
        return act()
    except EchelonError as error:
        return str(error)
    except Exception:
        return traceback.format_exc()


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    first = echelon.init()
    results = {}
    if first.world_size == 1:
        for case in zoo.CELLS:
            results[case] = tried(lambda case=case: whole(first, case))
        for name in features.FEATURES:
            print(name, flush=True)
            results[name] = tried(lambda name=name: feature(first, name))
    else:
        for form in FORMS:
            for case in [
                ("mlp", "bare"),
                ("cnn", "bare"),
                ("transformer", "adamw"),
                ("mlp", "sgd"),
                ("table", "adagrad"),
            ]:
                results[form, case] = cell(first, form, *case)
        results["mean-1", ("mlp", "bare", 2)] = cell(first, "mean-1", "mlp", "bare", 2)
    torch.save(results, Path(sys.argv[1]) / f"rank-{first.rank}.pt")


if __name__ == "__main__":
    main()
