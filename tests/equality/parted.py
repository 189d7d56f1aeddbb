"""Replicas of stages and of pieces that keep parts of them: what is lost, evaluated, saved, and loaded under the other form. parted.py OUT

`faults.lose` and `nonfinite=skip` too. Each rank writes what it holds; the loop in plain torch runs in test_parted.py.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon import faults
from echelon.errors import Preempted
from tests.equality import shared
from tests.equality import shared_zoo as zoo
from tests.equality.zoo import mean_ce
from tests.runs import finish_saving, lost_steps, skipped_updates, stop_at_step, when_it_arrives

KIND = "gpt"
TINY = "wrap_mib=0.0005,data=2"
PIPED = f"sharded,level=3,{TINY},pipeline=2,microbatches=2,cut=blocks.1"
TENSOR = f"sharded,level=3,{TINY},tensor=2"
SECOND = f"sharded,level=2,{TINY},pipeline=2,microbatches=2,cut=blocks.1"
STOP = 3
BAD = 2
"""The step whose loss is not finite, where such steps are skipped."""


def train(run, note, *, bad=0):
    """Steps of run.step; `bad`: that one's gradient is NaN."""
    model, dataset = zoo.make(KIND)
    opt, clip = zoo.optimizer_for("adamw", model)
    model, opt, loader = run.prepare(model, opt, zoo.loader_for(dataset))
    note["held"] = lambda: shared.held(run, model)
    for _ in run.epochs(zoo.EPOCHS):
        for batch in loader:
            wrong = float("nan") if run.global_step + 1 == bad else 1.0
            run.step(lambda out, y, wrong=wrong: mean_ce(out, y) * wrong, zoo.inputs(batch), clip_norm=clip)
    return model, dataset


def calm(runs, mesh, said, name, lost=(), **fields):
    for step in lost:
        faults.lose(step=step)
    run, note = runs.make(mesh, **fields), {}
    model, dataset = train(run, note)
    faults.clear()
    said[name] = {"held": note["held"](), "lost": lost_steps(run)}
    return run, model, dataset


def saved(runs, mesh, said, name):
    """Trains until step STOP, and is asked to stop there: there is a checkpoint."""
    run, note = runs.make(mesh, name, ema=0.9), {}
    stop_at_step(run, STOP)
    try:
        train(run, note)
    except Preempted:
        finish_saving(run)
        said[name] = note["held"]()
        return
    raise AssertionError("was not stopped")


def loaded(runs, mesh, source, said, name):
    run, note = runs.make(mesh, name, ema=0.9), {}
    when_it_arrives(run, lambda: said.update({(name, "loaded"): note["held"]()}))
    assert run.resume(runs.folder / source) == STOP
    model, _ = train(run, note)
    said[name, "end"] = note["held"]()
    run.save(runs.folder / f"average-{name}", model)
    finish_saving(run)


def main():
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    first = echelon.init()
    runs, said = shared.Runs(first, out), {}
    run, model, dataset = calm(runs, PIPED, said, "calm", strict=True)
    said["loss"] = run.evaluate(model, zoo.loader_for(dataset), shared.loss)
    run.save(out / "model", model)
    calm(runs, PIPED, said, "stormy", lost=(1, 2, 4))
    saved(runs, PIPED, said, "piped")
    loaded(runs, TENSOR, "piped", said, "tensor from piped")
    saved(runs, TENSOR, said, "tensor")
    loaded(runs, SECOND, "tensor", said, "piped from tensor")
    for mesh in (PIPED, TENSOR):
        note = {}
        run = runs.make(mesh, nonfinite="skip")
        train(run, note, bad=BAD)
        said["skipped", mesh] = {"held": note["held"](), "skipped": skipped_updates(run)}
    torch.save(said, out / f"rank-{first.rank}.pt")


if __name__ == "__main__":
    main()
