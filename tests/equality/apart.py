"""Loops under update=async and update=bounded, in one launch: what each rank ends with, and which samples it took.

Started by `echelon run --servers`; with one worker both are plain torch.
"""

import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon.strategy import Strategy
from tests.equality import features, zoo
from tests.runs import committed_samples, note_samples, run_beside, wait_for_everybody

FORMS = {
    "async": {"update": "async"},
    "bounded": {"update": "bounded", "staleness": 2},
}
LOOPS = [
    "map_style",
    "num_workers",
    "closure",
    "run_mean_over_unequal_counts",
    "run_evaluate",
    "two_losses_two_backwards",
]


def cell(first, form, kind, optimizer, accumulate, microbatches):
    strategy = Strategy(form="ps", accumulate=accumulate, microbatches=microbatches, **FORMS[form])
    run = run_beside(first, strategy)
    model, dataset = zoo.make(kind)
    opt, scheduler, _ = zoo.optimizer_for(optimizer, model, zoo.num_steps(accumulate))
    model, opt, loader = run.prepare(model, opt, zoo.loader_for(dataset))
    note_samples(loader)
    if scheduler:
        run.prepare(scheduler)
    for _ in run.epochs(zoo.EPOCHS):
        for x, y in loader:
            zoo.mean_ce(model(x), y).backward()
            opt.step()
            if scheduler:
                scheduler.step()
            opt.zero_grad()
    wait_for_everybody(run)
    return {k: v.clone() for k, v in model.state_dict().items()}, committed_samples(loader)


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    first = echelon.init()
    results = {}
    for form in FORMS:
        for case in zoo.CELLS:
            if case[0] != "table" and case[1] == "sgd":
                results[form, case] = cell(first, form, *case)
        for name in LOOPS:
            strategy = Strategy(form="ps", **FORMS[form])
            run = run_beside(first, strategy)
            results[form, name] = features.FEATURES[name](run), {}
            wait_for_everybody(run)
    torch.save(results, Path(sys.argv[1]) / f"rank-{first.rank}.pt")


main()
