"""Cells of the equality matrix, and every feature's loop, with parameter servers: servers that sum all or part of each bucket, and
servers that run the optimizer. Started by `echelon run --servers`; writes results, or why a loop was refused.
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
from tests.runs import num_hidden, run_beside, values_come_behind

values_come_behind()

FORMS = {
    "sums": {"form": "ps", "servers_share": 1.0},
    "some": {"form": "ps", "servers_share": 0.4},
    "applied": {"form": "ps", "apply": "server"},
    "bounded": {"form": "ps", "update": "bounded"},
    "behind": {"form": "ps", "update": "bounded", "staleness": 3},
}


def cell(first, form, kind, optimizer, accumulate, microbatches):
    model, dataset = zoo.make(kind)
    opt, scheduler, clip = zoo.optimizer_for(optimizer, model, zoo.num_steps(accumulate))
    by_server = {"clip_norm": clip or 0.0} if form in ("bounded", "behind") else {}
    run = make(first, form, accumulate=accumulate, microbatches=microbatches, **by_server)
    model, opt, loader = run.prepare(model, opt, zoo.loader_for(dataset))
    if scheduler:
        run.prepare(scheduler)
    for _ in run.epochs(zoo.EPOCHS):
        for x, y in loader:
            zoo.mean_ce(model(x), y).backward()
            if clip and not by_server:
                run.clip_grad_norm(model, clip)
            opt.step()
            if scheduler:
                scheduler.step()
            opt.zero_grad()
    if form == "applied":
        assert num_hidden(run) > 0, "no values came behind a forward"
    return {k: v.clone() for k, v in model.state_dict().items()}


def make(first, form, **fields):
    strategy = Strategy(**FORMS[form], **fields)
    return run_beside(first, strategy)


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
    for form in FORMS:
        for case in zoo.CELLS if form not in ("some", "behind") else zoo.CELLS[::3]:
            results[form, case] = tried(lambda form=form, case=case: cell(first, form, *case))
    chosen = sys.argv[2].split(",") if len(sys.argv) > 2 and sys.argv[2] else []
    for name in chosen:
        for form in ("sums", "applied"):
            body = features.FEATURES[name]
            print(form, name, flush=True)
            results[form, name] = tried(lambda form=form, body=body: body(make(first, form)))
    torch.save(results, Path(sys.argv[1]) / f"rank-{first.rank}.pt")


if __name__ == "__main__":
    main()
