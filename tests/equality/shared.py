"""Every model under every mesh of a tensor axis, in one launch. Started by `echelon run`.

shared.py OUT MESH…   a mesh is `tensor=4`, `data=2,tensor=2` or `tensor=2,pipeline=2,microbatches=2`
Each rank writes what it holds of every parameter and where that lies in the whole.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon import faults
from echelon.errors import Preempted
from echelon.parallel.local import local
from tests.equality import shared_zoo as zoo
from tests.equality.zoo import mean_ce
from tests.runs import finish_saving, lines_of_layers, lost_steps, run_beside, stop_at_step, where_it_lies

STOP = 3


class Runs:
    """Runs of several meshes in one launch."""

    def __init__(self, first, folder):
        self.first, self.folder = first, folder

    def make(self, mesh, folder="", **fields):
        return run_beside(self.first, mesh, folder=self.folder / folder if folder else None, **fields)


def held(run, model):
    """name -> (what is here, the whole's shape, its runs)"""
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        placed = where_it_lies(run, name, tensor)
        shape = placed.shape if placed else tuple(tensor.shape)
        runs = [(r.start, r.length, r.period, r.count) for r in placed.runs] if placed else None
        found[name] = local(tensor.detach()).clone(), shape, runs
    return found


def train(run, kind, optimizer, *, steps=False):
    model, dataset = zoo.make(kind)
    opt, clip = zoo.optimizer_for(optimizer, model)
    model, opt, loader = run.prepare(model, opt, zoo.loader_for(dataset))
    for _ in run.epochs(zoo.EPOCHS):
        for batch in loader:
            if steps:
                run.step(mean_ce, zoo.inputs(batch), clip_norm=clip)
                continue
            x, y = zoo.inputs(batch)
            mean_ce(model(*x), y).backward()
            if clip and kind == "gpt":
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            elif clip:
                run.clip_grad_norm(model, clip)
            opt.step()
            opt.zero_grad()
    return model, opt, dataset


def cell(run, kind, optimizer, **options):
    model, opt, dataset = train(run, kind, optimizer, **options)
    here = sum(p.numel() for p in model.parameters())
    state = sum(t.numel() for s in opt.state.values() for t in s.values() if t.dim())
    said = {"held": held(run, model), "lines": lines_of_layers(run, model)}
    said["uses"] = {name: (u.losses, u.gathers) for name, u in output_layers(model)}
    said |= {"here": here, "state": state, "lost": lost_steps(run)}
    said["loss"] = run.evaluate(model, zoo.loader_for(dataset), loss)
    said["outputs"] = zoo.outputs(model, dataset)
    return said


def output_layers(model):
    """Layers whose outputs are gathered only when they are read, with what became of them."""
    layers = ((name, vars(module).get("forward")) for name, module in model.named_modules())
    return [
        (name, layer.uses) for name, layer in layers if getattr(layer, "uses", None) and not layer.way.inside
    ]


def loss(model, batch):
    x, y = zoo.inputs(batch)
    return {"loss": (mean_ce(model(*x), y) * len(y), len(y))}


def stopped(runs, mesh, folder, **fields):
    """Trains until step STOP, and is asked to stop there: there is a checkpoint."""
    run = runs.make(mesh, folder, **fields)
    stop_at_step(run, STOP)
    try:
        train(run, "resnet", "adamw")
    except Preempted:
        finish_saving(run)
        return
    raise AssertionError("was not stopped")


def resumed(runs, mesh, source, folder, **fields):
    run = runs.make(mesh, folder, **fields)
    assert run.resume(runs.folder / source) == STOP
    model, *_ = train(run, "resnet", "adamw")
    finish_saving(run)
    return {"held": held(run, model)}


def plain_cells(runs, mesh, said):
    for kind, optimizer in zoo.cells(mesh):
        fields = {"tensor_plan": zoo.PLANS[kind]} if kind in zoo.PLANS else {}
        said[mesh, kind, optimizer] = cell(runs.make(mesh, **fields), kind, optimizer)
    for step in (1, 3, 4):
        faults.lose(step=step, optimizer=0)
    said[mesh, "lost"] = cell(runs.make(mesh), "two", "adamw")
    faults.clear()
    run = runs.make(mesh)
    said[mesh, "run.step"] = cell(run, "two", "adamw", steps=True)
    run.save(runs.folder / f"saved-{mesh}")


def saved_cells(runs, mesh, said):
    plan = {"tensor_plan": zoo.PLANS["resnet"]}
    stopped(runs, mesh, f"{mesh}-split", **plan)
    stopped(runs, "", f"{mesh}-whole")
    said[mesh, "split from split"] = resumed(runs, mesh, f"{mesh}-split", f"{mesh}-1", **plan)
    said[mesh, "whole from split"] = resumed(runs, "", f"{mesh}-split", f"{mesh}-2")
    said[mesh, "split from whole"] = resumed(runs, mesh, f"{mesh}-whole", f"{mesh}-3", **plan)


def staged_cells(runs, mesh, said):
    """A pipeline too, where run.step is the way, or replicas that keep parts of the pieces."""
    for kind in zoo.STAGED if "pipeline" in mesh else zoo.PARTED:
        fields = {"tensor_plan": zoo.PLANS[kind]} if kind in zoo.PLANS else {}
        run = runs.make(mesh, **fields)
        model, *_ = train(run, kind, "adamw", steps=True)
        said[mesh, kind, "adamw"] = {"held": held(run, model)}


def main():
    torch.set_num_threads(1)
    out, meshes = Path(sys.argv[1]), sys.argv[2:]
    first = echelon.init()
    runs, said = Runs(first, out), {}
    for mesh in meshes:
        if "pipeline" in mesh or "sharded" in mesh:
            staged_cells(runs, mesh, said)
            continue
        plain_cells(runs, mesh, said)
        if mesh != "tensor=4":
            saved_cells(runs, mesh, said)
    torch.save(said, out / f"rank-{first.rank}.pt")


if __name__ == "__main__":
    main()
