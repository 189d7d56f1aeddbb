"""Compressed runs. Started by `echelon run`; writes what each rank found.

compressed.py OUT train        every codec beside none, to the end; steps lost and runs resumed where sums are coded too
compressed.py OUT save         trains a little and stops with a checkpoint
compressed.py OUT load SOURCE  goes on from it, at any number of workers
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon import faults
from echelon.comm.codecs import plan
from echelon.errors import Preempted
from echelon.events import Warned
from echelon.strategy import Strategy
from tests.equality import storms
from tests.equality.resumed import Runs, same, stopped_and_resumed
from tests.runs import finish_saving, forms_of_sums, lost_steps, owed_by_name, stop_at_step, when_it_arrives

CODECS = ["none", "fp16", "bf16", "int8", "1bit", "topk:0.05", "powersgd:2"]
SCATTERED = ["compressed int8", "compressed topk accumulating", "compressed 1bit with a scaler"]
STOP = 3


def learn(run, epochs=10):
    """A small classifier in float32; gives its loss over all samples before and after, and its weights."""
    torch.manual_seed(5)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(96, 32, generator=g)
    y = (x[:, :4].sum(1) > 0).long() + 2 * (x[:, 4:8].sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.2)
    loader = DataLoader(
        TensorDataset(x, y), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(5)
    )
    model, opt, loader = run.prepare(model, opt, loader)
    before = float(F.cross_entropy(model(x), y))
    for _ in run.epochs(epochs):
        for a, b in loader:
            F.cross_entropy(model(a), b).backward()
            opt.step()
            opt.zero_grad()
    after = float(F.cross_entropy(model(x), y).detach())
    return {"before": before, "after": after, "weights": [p.detach().clone() for p in model.parameters()]}


def train(runs):
    said = {}
    for text in CODECS:
        run = runs.make(Strategy(compress=text), text)
        said[text] = learn(run)
        said[text]["forms"] = forms_of_sums(run)
    return said


def code_sums():
    """However few bytes that saves."""
    plan.MESSAGE_BYTES, plan.SPARSE_WORTH = -(1 << 40), 1e9


def scattered(runs):
    """Sums are coded as well, however small they are: (names that differ after lost steps, after a resume) of each loop."""
    code_sums()
    found = {}
    for name in SCATTERED:
        strategy, body = storms.LOOPS[name]
        faults.clear()
        calm_run = runs.make(strategy, f"{name}-calm")
        calm, _ = body(calm_run)
        forms = set(forms_of_sums(calm_run))
        for step in (1, 3, 4):
            faults.lose(step=step, optimizer=0)
        stormy_run = runs.make(strategy, f"{name}-stormy")
        stormy, _ = body(stormy_run)
        assert lost_steps(stormy_run) == 3
        problem, resumed = stopped_and_resumed(runs, name, strategy, lambda run, b=body: b(run)[0], STOP, 0)
        found[name] = forms, same(calm, stormy), problem or same(calm, resumed)
    return found


def save(runs):
    code_sums()
    run = runs.make(Strategy(compress="topk:0.05"), "saved")
    stop_at_step(run, STOP)
    try:
        learn(run, epochs=1)
    except Preempted:
        finish_saving(run)
    return {"owed": owed_by_name(run)}


def load(runs, source):
    told = []
    if runs.first.world_size == 4:
        code_sums()
    run = runs.make(Strategy(compress="topk:0.05"), "loaded", events=told)
    found = {}
    when_it_arrives(run, lambda: found.update(owed=owed_by_name(run)))
    found["step"] = run.resume(source / "runs" / "saved")
    found |= learn(run, epochs=1)
    found["warned"] = [event.message for event in told if isinstance(event, Warned)]
    return found


def main():
    torch.set_num_threads(1)
    out, mode = Path(sys.argv[1]), sys.argv[2]
    first = echelon.init()
    runs = Runs(first, out / "runs")
    if mode == "train":
        said = {"trained": train(runs), "scattered": scattered(runs)}
    else:
        said = save(runs) if mode == "save" else load(runs, Path(sys.argv[3]))
    torch.save(said, out / f"rank-{first.rank}.pt")


if __name__ == "__main__":
    main()
