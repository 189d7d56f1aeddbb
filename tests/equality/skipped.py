"""Loops some of whose gradients are not finite, under every form, in one launch: what each rank ends with, which updates were skipped, and what
it was told where they are refused. Started by `echelon run`; imported for the same loops in plain torch.

A marked sample makes the gradient of the last layer's bias NaN, and of nothing else: with several servers it lies on one of them.
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon.errors import NotFinite
from echelon.events import UpdateSkipped
from tests.runs import has_servers, run_beside, wait_for_everybody

SAMPLES, BATCH, EPOCHS = 44, 4, 2
MARKED = (9, 30)
"""In batches 3 and 8 of each epoch: worker 0's half of the first, worker 1's half of the second."""

APPLIED, BOUNDED = {"form": "ps", "apply": "server"}, {"form": "ps", "update": "bounded"}
WITH_SERVERS = {
    "sums": {"form": "ps", "servers_share": 1.0},
    "applied": APPLIED,
    "applied clipped": {**APPLIED, "clip_norm": 0.5},
    "applied accumulating": {**APPLIED, "accumulate": 2},
    "applied scaler": {**APPLIED, "nonfinite": "refuse"},
    "bounded": BOUNDED,
    "bounded clipped": {**BOUNDED, "clip_norm": 0.5},
}
WITHOUT = {
    "all-reduce": {},
    "all-reduce clipped": {"clip_norm": 0.5},
    "all-reduce accumulating": {"accumulate": 2},
    "all-reduce scaler": {"nonfinite": "refuse"},
    "all-reduce closure": {},
    "all-reduce lbfgs": {},
}
ALONE = {
    "async": {"form": "ps", "update": "async"},
    "async clipped": {"form": "ps", "update": "async", "clip_norm": 0.5},
    "first parts": {"form": "ps", "aggregate": 1},
    "first parts clipped": {"form": "ps", "aggregate": 1, "clip_norm": 0.5},
    "behind": {**BOUNDED, "staleness": 0},
    "local": {"form": "ps", "update": "local", "local_steps": 2},
}
APART = ("async", "first parts", "behind")
REFUSED = {"sums": {"form": "ps"}, "applied": APPLIED, "bounded": BOUNDED}


def parts():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    g = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=g, dtype=torch.float64)
    marks = torch.zeros(SAMPLES, dtype=torch.float64)
    marks[list(MARKED)] = float("nan")
    data = TensorDataset(x, torch.randint(0, 4, (SAMPLES,), generator=g), marks)
    return model, DataLoader(data, batch_size=BATCH)


def optimizer_for(name, model):
    if "lbfgs" in name:
        return torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)
    if "local" in name:
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def loss_of(model, x, y, marks):
    return F.cross_entropy(model(x), y) + model[-1].bias[0] * marks.mean()


def finite(model):
    return all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in model.parameters())


def train(run, name):
    """The loop as a user writes it."""
    model, loader = parts()
    opt = optimizer_for(name, model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.97)
    scaler = torch.amp.GradScaler("cpu", enabled="scaler" in name, init_scale=4.0)
    model, opt, loader, scheduler, scaler = run.prepare(model, opt, loader, scheduler, scaler)
    for _ in run.epochs(EPOCHS):
        for batch in loader:
            if "closure" in name or "lbfgs" in name:

                def closure(batch=batch):
                    opt.zero_grad()
                    loss = loss_of(model, *batch)
                    loss.backward()
                    return loss

                opt.step(closure)
            else:
                scaler.scale(loss_of(model, *batch)).backward()
                scaler.step(opt)
                scaler.update()
            scheduler.step()
            opt.zero_grad()
    wait_for_everybody(run)
    return {k: v.clone() for k, v in model.state_dict().items()}


def by_hand(name, fields):
    """One process in plain torch that skips the same updates: weights, and the numbers of the steps that were skipped."""
    model, loader = parts()
    opt = optimizer_for(name, model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.97)
    scaler = torch.amp.GradScaler("cpu", enabled="scaler" in name, init_scale=4.0)
    step, skipped, group = 0, [], int(fields.get("accumulate", 1))
    for _ in range(EPOCHS):
        batches = list(loader)
        for begin in range(0, len(batches), group):
            some = batches[begin : begin + group]
            count = sum(len(batch[0]) for batch in some)
            for batch in some:
                scaler.scale(loss_of(model, *batch) * (len(batch[0]) / count)).backward()
            if "scaler" in name:
                before = scaler.get_scale()
                scaler.step(opt)
                scaler.update()
                if scaler.get_scale() >= before:
                    scheduler.step()
                opt.zero_grad()
                continue
            step += 1
            if not finite(model):
                skipped.append(step)
            elif "lbfgs" in name:

                def closure(batch=some[0]):
                    opt.zero_grad()
                    loss = loss_of(model, *batch)
                    loss.backward()
                    return loss

                opt.step(closure)
            else:
                if fields.get("clip_norm"):
                    nn.utils.clip_grad_norm_(model.parameters(), fields["clip_norm"])
                opt.step()
            scheduler.step()
            opt.zero_grad()
    return {k: v.clone() for k, v in model.state_dict().items()}, skipped


def refused(first, fields):
    """Weights after the update that was refused, and what was said."""
    run = run_beside(first, events=[], nonfinite="refuse", **fields)
    model, loader = parts()
    model, opt, loader = run.prepare(model, optimizer_for("", model), loader)
    try:
        for batch in loader:
            loss_of(model, *batch).backward()
            opt.step()
            opt.zero_grad()
    except NotFinite as error:
        told = {"message": str(error), "step": error.step, "consequence": error.consequence}
        return told, {k: v.clone() for k, v in model.state_dict().items()}
    return {"message": "nothing was refused"}, {}


def copies(first, breaks):
    """update=local, where worker 1's own weights become NaN after its third step, if `breaks`."""
    events = []
    fields = {"form": "ps", "update": "local", "nonfinite": "skip"}
    run = run_beside(first, events=events, **fields)
    model, loader = parts()
    model, opt, loader = run.prepare(model, optimizer_for("local", model), loader)
    for epoch in run.epochs(EPOCHS):
        for i, batch in enumerate(loader):
            loss_of(model, *batch).backward()
            opt.step()
            opt.zero_grad()
            if breaks and (epoch, i, run.rank) == (1, 2, 1):
                model[0].weight.data[3, 2] = float("nan")
    skips = [event.step for event in events if isinstance(event, UpdateSkipped)]
    return {k: v.clone() for k, v in model.state_dict().items()}, skips


def copies_by_hand(breaks):
    """Two copies in one process: a step each, then their mean by samples."""
    models = [parts()[0] for _ in range(2)]
    optimizers = [optimizer_for("local", model) for model in models]
    loader = parts()[1]
    for epoch in range(EPOCHS):
        batches = list(loader)
        for i, begin in enumerate(range(0, len(batches), 2)):
            weights = []
            for rank, batch in enumerate(batches[begin : begin + 2]):
                loss_of(models[rank], *batch).backward()
                if finite(models[rank]):
                    optimizers[rank].step()
                optimizers[rank].zero_grad()
                out = breaks and (epoch, i, rank) == (1, 2, 1)
                weights.append(0 if out else len(batch[0]))
            with torch.no_grad():
                for of in zip(*(model.parameters() for model in models), strict=True):
                    mean = sum(p * (w / sum(weights)) for p, w in zip(of, weights, strict=False) if w)
                    for p in of:
                        p.copy_(mean)
    return {k: v.clone() for k, v in models[0].state_dict().items()}


def cell(first, name, fields):
    events = []
    run = run_beside(first, events=events, **{"nonfinite": "skip", **fields})
    weights = train(run, name)
    return weights, [event.step for event in events if isinstance(event, UpdateSkipped)]


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    first = echelon.init()
    servers = has_servers(first)
    results = {}
    chosen = (WITH_SERVERS if first.world_size > 1 else ALONE) if servers else WITHOUT
    for name, fields in chosen.items():
        results[name] = cell(first, name, fields)
    if servers and first.world_size > 1:
        for name in APART:
            results["apart", name] = cell(
                first, name, {**ALONE[name], **({"staleness": 2} if name == "behind" else {})}
            )
        for breaks in (False, True):
            results["copies", breaks] = copies(first, breaks)
        for name, fields in REFUSED.items():
            results["refused", name] = refused(first, fields)
    elif first.world_size > 1:
        results["compressed"] = cell(first, "compressed", {"compress": "fp16"})
        results["refused", "all-reduce"] = refused(first, {})
        results["refused", "compressed"] = refused(first, {"compress": "fp16"})
    torch.save(results, Path(sys.argv[1]) / f"rank-{first.rank}.pt")


if __name__ == "__main__":
    main()
