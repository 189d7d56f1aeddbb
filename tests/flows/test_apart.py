"""Runs whose workers are not at one place (update=async, update=bounded), stopped and resumed."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = """
import sys, time, torch, echelon
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
run = echelon.init()
torch.manual_seed(3)
g = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(44, 6, generator=g), torch.randint(0, 4, (44,), generator=g))
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
model, opt, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.05), DataLoader(data, batch_size=4, shuffle=True))
val = DataLoader(data, batch_size=16)
seen = open(f"seen-{run.rank}", "a")
def judge(model, batch):
    return {"loss": (F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))}
for epoch in run.epochs(int(sys.argv[1])):
    for x, y in loader:
        time.sleep(0.06 if run.rank == 0 else 0.02)
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        print(len(x), file=seen, flush=True)
    run.print("epoch", epoch, "loss", run.evaluate(model, val, judge)["loss"])
"""


@pytest.mark.timeout(600)
@pytest.mark.case("ps,update=async: SIGTERM and --resume")
@pytest.mark.parametrize("update", ["async", pytest.param("bounded,staleness=2", marks=pytest.mark.slow)])
def test_sigterm_stops_workers_wherever_they_are_and_resume_takes_the_rest(start_run, tmp_path, update):
    options = ("--servers", "1", "--strategy", f"ps,update={update}", "--name", "apart")
    running = start_run(SCRIPT, "16", workers=3, options=options)
    running.until(lambda: running.shows("epoch 1"), 150)
    running.kill("worker", 1, signal.SIGTERM)
    stopped = running.wait(150)
    assert stopped.code == 75, stopped.err[-3000:]
    assert 44 < _seen(tmp_path) < 16 * 44
    fewer = 2 if update == "async" else 3  # the ledger is nobody's in particular
    again = start_run(SCRIPT, "16", workers=fewer, options=(*options, "--resume"))
    result = again.wait(150)
    assert result.code == 0, result.err[-3000:]
    assert "epoch 15" in result.out + result.err
    assert _seen(tmp_path) == 16 * 44
    assert re.search(r"server 0: \d+ MiB, [\d,]+ updates", result.err)


def _seen(folder: Path) -> int:
    """Samples that all workers stepped on so far."""
    return sum(int(line) for file in folder.glob("seen-*") for line in file.read_text().split())


KILLED = """
import sys, time, torch, echelon
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
run = echelon.init()
torch.manual_seed(3)
g = torch.Generator().manual_seed(1)
data = TensorDataset(torch.arange(60), torch.randn(60, 6, generator=g), torch.randint(0, 4, (60,), generator=g))
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
model, opt, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.05), DataLoader(data, batch_size=4, shuffle=True))
seen = open(f"seen-{run.rank}", "a")
def judge(model, batch):
    return {"loss": (F.cross_entropy(model(batch[1]), batch[2], reduction="sum"), len(batch[2]))}
for epoch in run.epochs(int(sys.argv[1])):
    for ids, x, y in loader:
        time.sleep(0.05)
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        for i in ids.tolist():
            print(epoch, i, file=seen)
        seen.flush()
    with run.phase(f"epoch {epoch}"):
        print(epoch, run.rank, file=open("phases", "a"))
    run.checkpoint()
    run.print("epoch", epoch, "loss", run.evaluate(model, DataLoader(data, batch_size=16), judge)["loss"])
run.save("weights")
"""


@pytest.mark.timeout(600)
@pytest.mark.case("ps,update=async: a killed worker")
@pytest.mark.case("ps,update=async: worker 0 is killed")
def test_killed_workers_of_async_are_missed_by_nobody_not_even_worker_0(start_run, tmp_path):
    """Their batches are dealt again, and whoever is left prints, saves and does the phases."""
    options = ("--servers", "2", "--strategy", "ps,update=async", "--name", "killed")
    running = start_run(KILLED, "7", workers=3, options=options)
    running.until(lambda: running.shows("epoch 1"), 150)
    running.kill("worker", 0, signal.SIGKILL)
    running.until(lambda: running.shows("epoch 3"), 150)
    running.kill("worker", 2, signal.SIGKILL)
    result = running.wait(150)
    assert result.code == 0, result.err[-3000:]
    assert "worker 0 was killed" in result.err
    assert "worker 2 was killed" in result.err
    assert "epoch 6" in result.out
    seen = [line for file in sorted(tmp_path.glob("seen-*")) for line in file.read_text().splitlines()]
    for epoch in range(7):
        counts = Counter(int(line.split()[1]) for line in seen if line.startswith(f"{epoch} "))
        twice = sum(counts.values()) - 60
        assert sorted(counts) == list(range(60))
        assert twice in (
            0,
            4,
        )  # what it had stepped on, and died before it could say so, others step on again, without effect
    phases = [line.split() for line in (tmp_path / "phases").read_text().splitlines()]
    by = {int(epoch): int(rank) for epoch, rank in phases}
    assert sorted(by) == list(range(7))
    assert (by[0], by[6]) == (0, 1)
    manifests = sorted((result.run_dir / "checkpoints").glob("*/manifest.json"))
    assert json.loads(manifests[-1].read_text())["about"]["workers"] == 1
    assert (tmp_path / "weights.safetensors").exists()
    updates = re.search(r"server 0: \d+ MiB, ([\d,]+) updates", result.err)
    assert updates is not None
    assert int(updates.group(1)) == 7 * 15
    assert re.search(r"\d steps, 420 samples", result.err), result.err


IDLE = """
import pathlib, time, torch, echelon
from torch.utils.data import DataLoader, TensorDataset
run = echelon.init()
torch.manual_seed(3)
data = TensorDataset(torch.randn(16, 6), torch.randn(16, 1))
model = torch.nn.Linear(6, 1)
began = model.weight.detach().clone()
model, opt, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.05), DataLoader(data, batch_size=4))
done = pathlib.Path("done")
while run.rank == 0 and not done.exists():
    time.sleep(0.01)
steps = 0
for x, y in loader:
    torch.nn.functional.mse_loss(model(x), y).backward()
    opt.step()
    opt.zero_grad()
    steps += 1
    if steps == 4:
        done.touch()
run.save("model")
print("steps", steps, "moved", not torch.equal(model.weight, began))
"""


def test_a_worker_that_never_got_a_batch_ends_with_the_servers_weights(echelon_run):
    """Worker 0 comes when worker 1 has taken all batches: it saves what the servers have, not what it began with."""
    result = echelon_run(IDLE, workers=2, options=("--servers", "1", "--strategy", "ps,update=async"))
    assert result.code == 0, result.err[-3000:]
    assert "steps 0 moved True" in result.log(0)
    assert "steps 4 moved True" in result.log(1)
