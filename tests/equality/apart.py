"""Loops under update=async and update=bounded, in one launch: what each rank ends with, and which samples it took.

Started by `echelon run --servers`; with one worker both are plain torch.
"""

import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon.run import Run
from echelon.strategy import Strategy
from tests.equality import features, zoo

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
    run = Run(first.place, strategy, None, first.emit, world=first.world)
    model, dataset = zoo.make(kind)
    opt, scheduler, _ = zoo.optimizer_for(optimizer, model, zoo.num_steps(accumulate))
    model, opt, loader = run.prepare(model, opt, zoo.loader_for(dataset))
    loader._feed.ledger.keep_ids = True
    if scheduler:
        run.prepare(scheduler)
    for _ in run.epochs(zoo.EPOCHS):
        for x, y in loader:
            zoo.mean_ce(model(x), y).backward()
            opt.step()
            if scheduler:
                scheduler.step()
            opt.zero_grad()
    run.machine.drain(all_here=True)
    loader._feed.mark()
    ids = {e: entry.ids for e, entry in loader._feed.ledger.epochs.items()}
    return {k: v.clone() for k, v in model.state_dict().items()}, ids


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
            run = Run(first.place, strategy, None, first.emit, world=first.world)
            results[form, name] = features.FEATURES[name](run), {}
            run.machine.drain(all_here=True)
    torch.save(results, Path(sys.argv[1]) / f"rank-{first.rank}.pt")


main()
