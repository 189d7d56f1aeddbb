"""Saved under one form, loaded under another: parameters bit for bit, and the run ends where one process does.

sharded_saved.py OUT [SOURCE]   saves under every form and loads each under the next one; with SOURCE, loads what another launch saved.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon.errors import Preempted
from echelon.parallel.local import full
from echelon.strategy import Strategy
from tests.equality import split_zoo, zoo
from tests.equality.resumed import Runs
from tests.runs import finish_saving, stop_at_step, when_it_arrives

TINY = 0.0002
STOP = 3
FORMS = {
    "allreduce": Strategy(ema=0.9),
    "level 3": Strategy(form="sharded", level=3, wrap_mib=TINY, ema=0.9),
    "level 1": Strategy(form="sharded", level=1, ema=0.9),
    "level 2": Strategy(form="sharded", level=2, wrap_mib=TINY, ema=0.9),
}


def weights(model):
    return {k: full(v.detach()).clone() for k, v in model.state_dict().items()}


def train(run, kind, note):
    model, dataset = split_zoo.make(kind)
    opt, scheduler, clip = zoo.optimizer_for("adamw", model, zoo.num_steps(1))
    model, opt, loader, scheduler = run.prepare(model, opt, zoo.loader_for(dataset), scheduler)
    note["weights"] = lambda: weights(model)
    for _ in run.epochs(zoo.EPOCHS):
        for batch in loader:
            split_zoo.loss_of(model, batch).backward()
            run.clip_grad_norm(model, clip)
            opt.step()
            scheduler.step()
            opt.zero_grad()
    note["model"] = model
    return weights(model)


def save(runs, kind, form, folder):
    run, note = runs.make(FORMS[form], f"{folder}/{kind}"), {}
    stop_at_step(run, STOP)
    try:
        train(run, kind, note)
    except Preempted:
        pass
    finish_saving(run)
    return note["weights"]()


def load(runs, kind, form, source, name):
    run, note, said = runs.make(FORMS[form], name), {}, {}
    when_it_arrives(run, lambda: said.update(loaded=note["weights"]()))
    said["resumed"] = run.resume(source)
    said["weights"] = train(run, kind, note)
    said["file"] = load_file(
        run.save(source.parent / f"{kind}-under-{form}", note["model"])
    )  # the averaged weights
    finish_saving(run)
    return said


def main():
    torch.set_num_threads(1)
    out, first, said = Path(sys.argv[1]), echelon.init(), {}
    runs, forms = Runs(first, out), list(FORMS)
    for i, form in enumerate(forms):
        for kind in ("mlp", "gpt"):
            source = Path(sys.argv[2]) if len(sys.argv) > 2 else out
            if source is out:
                said[kind, form, "saved"] = save(runs, kind, form, form)
            other = forms[(i + 1) % len(forms)]
            said[kind, form, other] = load(runs, kind, other, source / form / kind, f"{form}-again-{kind}")
    torch.save(said, out / f"rank-{first.rank}.pt")


if __name__ == "__main__":
    main()
