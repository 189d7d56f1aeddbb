"""Saved at one number of workers, loaded at another: the state bit for bit, the epoch's samples once each.

worlds.py OUT STOP SOURCE [FORM]   trains every loop until step STOP (0: to its end), from the checkpoints in SOURCE if it is not "-".
FORM "applied": servers run the optimizer.
Each rank writes the state as it was when it was saved or loaded, its committed ids, and the final weights.
"""

import dataclasses
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon.errors import Preempted
from echelon.strategy import Strategy
from tests.equality import zoo
from tests.equality.resumed import Runs
from tests.runs import averages, committed_samples, finish_saving, note_samples, stop_at_step, when_it_arrives

LOOPS = {
    "mlp": (Strategy(ema=0.9), "adamw", 1),
    "cnn": (Strategy(microbatches=2), "sgd", 1),
    "transformer": (Strategy(accumulate=2), "adamw", 2),
    "table": (Strategy(), "adagrad", 1),
}


def train(run, kind, optimizer, accumulate, note):
    model, dataset = zoo.make(kind)
    opt, scheduler, clip = zoo.optimizer_for(optimizer, model, zoo.num_steps(accumulate))
    model, opt, loader = run.prepare(model, opt, zoo.loader_for(dataset))
    note_samples(loader)
    if scheduler:
        run.prepare(scheduler)
    note["state"] = lambda: state(run, model, opt, scheduler)
    note["ids"] = lambda over: committed_samples(loader, over=over)
    for _ in run.epochs(zoo.EPOCHS):
        for x, y in loader:
            loss = zoo.mean_ce(model(x), y)
            loss.backward()
            if clip:
                run.clip_grad_norm(model, clip)
            opt.step()
            if scheduler:
                scheduler.step()
            opt.zero_grad()
    return {k: v.clone() for k, v in model.state_dict().items()}


def state(run, model, opt, scheduler):
    """All that must be the same after loading."""
    opt.state_dict()  # where servers have it, it comes here
    out = {f"model.{k}": v.clone() for k, v in model.state_dict().items()}
    for name, param in model.named_parameters():
        out |= {
            f"{name}.{k}": torch.as_tensor(v).clone()
            for k, v in opt.state.get(param, {}).items()
            if v is not None
        }
    out |= {f"ema.{i}": t.clone() for i, (_, t) in enumerate(averages(run, model))}
    out["lr"] = torch.tensor([g["lr"] for g in opt.param_groups])
    out["scheduler"] = torch.tensor([scheduler.last_epoch, scheduler._step_count] if scheduler else [0])
    out["step"] = torch.tensor(run.global_step)
    return out


def one(runs, kind, stop_at, source, form):
    strategy, optimizer, accumulate = LOOPS[kind]
    if form == "applied":
        strategy = dataclasses.replace(strategy, form="ps", apply="server")
    run, note, said = runs.make(strategy, kind), {}, {}
    if source:
        when_it_arrives(run, lambda: said.update(loaded=note["state"]()))
        said["resumed"] = run.resume(source / "runs" / kind)
    if stop_at:
        stop_at_step(run, stop_at)
    try:
        said["weights"] = train(run, kind, optimizer, accumulate, note)
    except Preempted:
        said["saved"] = note["state"]()
    finish_saving(run)
    said["ids"] = note["ids"](over="weights" in said)
    return said


def main():
    torch.set_num_threads(1)
    out, stop_at, source = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    form = sys.argv[4] if len(sys.argv) > 4 else ""
    first = echelon.init()
    runs = Runs(first, out / "runs")
    kinds = [kind for kind in LOOPS if form != "applied" or kind != "table"]  # its gradients are sparse
    kinds = [kind for kind in kinds if source == "-" or (Path(source) / "runs" / kind).exists()]
    said = {kind: one(runs, kind, stop_at, None if source == "-" else Path(source), form) for kind in kinds}
    torch.save(said, out / f"rank-{first.rank}.pt")


if __name__ == "__main__":
    main()
