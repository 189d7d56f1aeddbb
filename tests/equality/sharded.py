"""All cells of the sharded matrix at one world size, in one launch. Started by `echelon run`; writes each rank's results.

pickle.loads raises from the beginning: nothing that travels between ranks is one.
"""

import itertools
import pickle
import sys
import traceback
from pathlib import Path

import torch

import echelon
from echelon import faults
from echelon.parallel.local import full
from echelon.strategy import Strategy

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.equality import split_zoo, zoo
from tests.runs import run_beside

TINY = 0.0002  # MiB: every layer of the equality models that can be a unit is one


def cells(workers):
    """(name, model, optimizer, accumulate, microbatches, fields)"""
    kinds = split_zoo.KINDS
    found = []
    for level, kind, optimizer in itertools.product((1, 2, 3), kinds, ("sgd", "adamw")):
        for accumulate, microbatches in ((1, 1), (1, 2), (3, 1), (3, 2)):
            found.append((kind, optimizer, accumulate, microbatches, {"level": level, "wrap_mib": TINY}))
    found += [(kind, "adamw", 1, 1, {"level": 3}) for kind in kinds]  # one unit
    found += [("table", "adagrad", 1, 1, {"level": level, "wrap_mib": TINY}) for level in (1, 2, 3)]
    if workers == 4:
        found += [
            (kind, "adamw", 3, 1, {"level": level, "wrap_mib": TINY, "shard_workers": 2})
            for kind in kinds
            for level in (2, 3)
        ]
    return found


def some(chosen):
    """A few of them: every model, level, optimizer and cut, not in every combination."""
    return [case for i, case in enumerate(chosen) if i % 7 == 0 or i >= len(chosen) - 7]


def key(case):
    *plain, fields = case
    return (*plain, ",".join(f"{k}={v}" for k, v in fields.items()))


def weights(model):
    return {k: full(v.detach()).clone() for k, v in model.state_dict().items()}


def cell(first, kind, optimizer, accumulate, microbatches, fields, lose=()):
    strategy = Strategy(form="sharded", accumulate=accumulate, microbatches=microbatches, **fields)
    run = run_beside(first, strategy)
    model, dataset = split_zoo.make(kind)
    opt, scheduler, clip = zoo.optimizer_for(optimizer, model, zoo.num_steps(accumulate))
    model, opt, loader = run.prepare(model, opt, zoo.loader_for(dataset))
    if scheduler:
        run.prepare(scheduler)
    for step in lose:
        faults.lose(step=step)
    for _ in run.epochs(zoo.EPOCHS):
        for batch in loader:
            split_zoo.loss_of(model, batch).backward()
            if (
                clip and kind == "gpt"
            ):  # a single number stays whole beside what is split: torch's own clipping takes one kind
                run.clip_grad_norm(model, clip)
            elif clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            if scheduler:
                scheduler.step()
            opt.zero_grad()
    assert run.global_step == zoo.num_steps(accumulate), run.global_step
    return weights(model)


def refuse(*args, **kwargs):
    raise AssertionError("something was unpickled")


def main():
    torch.set_num_threads(1)
    pickle.loads = refuse
    first = echelon.init()
    results = {}
    chosen = cells(first.world_size)
    for case in chosen if sys.argv[2:] != ["some"] else some(chosen):
        try:
            results[key(case)] = cell(first, *case)
        except Exception:
            raise RuntimeError(f"cell {case}: {traceback.format_exc()}") from None
    torch.save(results, Path(sys.argv[1]) / f"rank-{first.rank}.pt")


if __name__ == "__main__":
    main()
