"""Loops that lose steps on purpose, beside the same loops undisturbed: the bits must be the same. Writes results."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon import faults
from echelon.strategy import Strategy

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.equality import zoo
from tests.runs import averages, committed_samples, lost_steps, note_samples, run_beside


def loop(run, kind="mlp", loader_options=None, hand=1, scaler=None, autocast=False, ema=None):
    """A plain loop in the common shape; returns everything that must be equal."""
    model, dataset = zoo.make(kind)
    if autocast:
        model = model.float()
    opt, scheduler, _ = zoo.optimizer_for("adamw", model, 10)
    model, opt, loader, scheduler = run.prepare(
        model, opt, zoo.loader_for(dataset, **(loader_options or {})), scheduler
    )
    note_samples(loader)
    if scaler:
        run.prepare(scaler)
    average = run.track(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))) if ema else None
    noise = [torch.zeros(0)]
    for _ in run.epochs(zoo.EPOCHS):
        for i, (x, y) in enumerate(loader):
            x = x.float() if autocast and x.is_floating_point() else x
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = zoo.mean_ce(model(x), y)
            drawn = torch.rand(1)  # the script's own randomness must come out the same after a replay
            loss = (loss + 0 * drawn.sum()) / hand
            (scaler.scale(loss) if scaler else loss).backward()
            if hand > 1 and (i + 1) % hand:
                continue
            if scaler:
                scaler.step(opt)
                scaler.update()
            else:
                opt.step()
            scheduler.step()
            opt.zero_grad()
            if average is not None:
                average.update_parameters(model)
            if run.every(1):
                noise.append(drawn)
    ids = {e: sorted(found) for e, found in committed_samples(loader).items()}
    out = {f"model.{k}": v for k, v in model.state_dict().items()}
    out |= {f"average.{k}": v for k, v in average.state_dict().items()} if average is not None else {}
    out |= {f"ema.{i}": t for i, (_, t) in enumerate(averages(run, model))}
    out |= {
        "noise": torch.cat(noise),
        "lr": torch.tensor(scheduler.get_last_lr()),
        "steps": torch.tensor(run.global_step),
    }
    out["scale"] = torch.tensor(scaler.get_scale() if scaler else 1.0)
    return {k: v.clone() for k, v in out.items()}, ids


def gan(run):
    """Two models, two optimizers, two steps an iteration; noise comes with the data."""
    torch.manual_seed(7)
    g = torch.Generator().manual_seed(2)
    data = TensorDataset(
        torch.randn(22, 2, generator=g, dtype=zoo.D), torch.randn(22, 3, generator=g, dtype=zoo.D)
    )
    make = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).to(zoo.D)
    tell = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Linear(8, 1)).to(zoo.D)
    opt_tell, opt_make = torch.optim.Adam(tell.parameters(), 0.01), torch.optim.Adam(make.parameters(), 0.01)
    loader = DataLoader(data, batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(1))
    sched = torch.optim.lr_scheduler.StepLR(opt_tell, 2, 0.5)
    make, tell, opt_tell, opt_make, loader, sched = run.prepare(make, tell, opt_tell, opt_make, loader, sched)
    note_samples(loader)
    bce = nn.functional.binary_cross_entropy_with_logits
    for _ in run.epochs(2):
        for real, noise in loader:
            fake = make(noise)
            opt_tell.zero_grad()
            yes, no = tell(real), tell(fake.detach())
            (bce(yes, torch.ones_like(yes)) + bce(no, torch.zeros_like(no))).backward()
            opt_tell.step()
            sched.step()
            opt_make.zero_grad()
            verdict = tell(fake)
            bce(verdict, torch.ones_like(verdict)).backward()
            opt_make.step()
    ids = {e: sorted(found) for e, found in committed_samples(loader).items()}
    out = {f"make.{k}": v for k, v in make.state_dict().items()} | {
        f"tell.{k}": v for k, v in tell.state_dict().items()
    }
    out["lr"] = torch.tensor(sched.get_last_lr())
    return {k: v.clone() for k, v in out.items()}, ids


def scaler():
    return torch.amp.GradScaler(
        "cpu", init_scale=2.0**40, growth_interval=2
    )  # overflows at first: skips and shrinks


LOOPS = {
    "plain": (Strategy(), lambda run: loop(run)),
    "accumulating": (Strategy(accumulate=3), lambda run: loop(run)),
    "accumulating by hand": (Strategy(), lambda run: loop(run, hand=2, loader_options={"drop_last": True})),
    "micro-batches": (Strategy(microbatches=2, accumulate=2), lambda run: loop(run, "transformer")),
    "amp": (Strategy(), lambda run: loop(run, autocast=True)),
    "scaler": (Strategy(), lambda run: loop(run, autocast=True, scaler=scaler())),
    "batchnorm": (Strategy(), lambda run: loop(run, "cnn")),
    "ema of the strategy": (Strategy(ema=0.9), lambda run: loop(run)),
    "ema of the script": (Strategy(), lambda run: loop(run, ema=True)),
    "loader processes": (
        Strategy(),
        lambda run: loop(run, loader_options={"num_workers": 2, "persistent_workers": True}),
    ),
    "gan": (Strategy(), gan),
    "compressed int8": (Strategy(compress="int8", ema=0.9), lambda run: loop(run, "cnn")),
    "compressed topk accumulating": (
        Strategy(compress="topk:0.1", accumulate=3),
        lambda run: loop(run, "transformer"),
    ),
    "compressed 1bit with a scaler": (
        Strategy(compress="1bit"),
        lambda run: loop(run, autocast=True, scaler=scaler()),
    ),
    "compressed powersgd": (Strategy(compress="powersgd:1"), lambda run: loop(run)),
    "compressed fp16 gan": (Strategy(compress="fp16", clip_norm=1.0), gan),
}


def brew(name):
    """The steps that a loop is to lose."""
    last = 4 if "accum" in name else 6
    for step in (1, 3, 3, last if "accum" in name or "micro" in name else 10):
        faults.lose(step=step, optimizer=0)
    if name.endswith("gan"):
        faults.lose(step=2, optimizer=1)
        faults.lose(step=6, optimizer=1)
        faults.lose(step=6, optimizer=1)  # and again, when its batches have come again


def main():
    torch.set_num_threads(1)
    first = echelon.init()
    results = {}
    for name, (strategy, body) in LOOPS.items():
        results[name] = []
        for storm in (False, True):
            faults.clear()
            if storm:
                brew(name)
            run = run_beside(first, strategy)
            weights, ids = body(run)
            results[name].append((weights, ids, lost_steps(run)))
    torch.save(results, Path(sys.argv[1]) / f"rank-{first.rank}.pt")


if __name__ == "__main__":
    main()
