"""Steps of the first parts (backup, aggregate) with real processes: late parts are dropped, and their samples dealt again."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter

import pytest

SCRIPT = """
import json, sys, time, torch, echelon
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from tests.runs import committed_samples, note_samples
run = echelon.init()
torch.manual_seed(3)
g = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(90, 6, generator=g), torch.randint(0, 4, (90,), generator=g))
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
model, opt, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.05), DataLoader(data, batch_size=12, shuffle=True))
scheduler = run.prepare(torch.optim.lr_scheduler.StepLR(opt, 1000))
note_samples(loader)
def judge(model, batch):
    return {"loss": (F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))}
slow = float(sys.argv[2])
for epoch in run.epochs(int(sys.argv[1])):
    for x, y in loader:
        time.sleep(slow if run.rank == run.world_size - 1 else 0.03)
        F.cross_entropy(model(x), y).backward()
        opt.step()
        scheduler.step()
        opt.zero_grad()
    loss = run.evaluate(model, DataLoader(data, batch_size=16), judge)["loss"]
    run.print("epoch", epoch, "loss", loss, "updates", run.global_step)
ids = committed_samples(loader)
total = float(sum(p.double().sum() for p in model.parameters()))
json.dump({"ids": ids, "sum": total, "step": run.global_step, "scheduler": scheduler.last_epoch}, open(f"rank-{run.rank}.json", "w"))
"""
EPOCHS, SAMPLES, BATCHES = 4, 90, 8


def _told(folder, ranks):
    return [json.loads((folder / f"rank-{r}.json").read_text()) for r in ranks]


def _counted(told):
    """Epoch -> how often each sample was in an update."""
    return {e: Counter(i for one in told for i in one["ids"].get(str(e), [])) for e in range(EPOCHS)}


@pytest.mark.timeout(600)
@pytest.mark.case("ps,backup: late parts are dropped and dealt again")
@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_late_parts_are_dropped_and_every_sample_is_in_one_update(start_run, tmp_path, servers):
    options = ("--servers", str(servers), "--strategy", "ps,backup=1")
    result = start_run(SCRIPT, str(EPOCHS), "0.2", workers=4, options=options).wait(120)
    assert result.code == 0, result.err[-3000:]
    told = _told(tmp_path, range(4))
    for epoch, counts in _counted(told).items():
        assert counts == Counter(range(SAMPLES)), epoch
    assert len({one["sum"] for one in told}) == 1
    updates = {one["step"] for one in told}
    assert len(updates) == 1
    assert EPOCHS * BATCHES <= updates.pop() <= EPOCHS * (BATCHES + 3)
    assert int(re.search(r"(\d+) dropped parts", result.err).group(1)) > 0
    assert (
        told[0]["scheduler"] > told[3]["scheduler"]
    )  # a worker that misses updates steps its scheduler less often


@pytest.mark.timeout(600)
@pytest.mark.case("ps,aggregate: more parts than workers")
def test_two_workers_give_five_parts_to_each_update(start_run, tmp_path):
    options = ("--servers", "1", "--strategy", "ps,aggregate=5")
    result = start_run(SCRIPT, str(EPOCHS), "0.03", workers=2, options=options).wait(120)
    assert result.code == 0, result.err[-3000:]
    told = _told(tmp_path, range(2))
    for epoch, counts in _counted(told).items():
        assert counts == Counter(range(SAMPLES)), epoch
    assert {one["step"] for one in told} <= set(range(EPOCHS * BATCHES, EPOCHS * (BATCHES + 2)))


@pytest.mark.timeout(600)
@pytest.mark.case("ps,backup: a killed worker")
def test_a_killed_backup_worker_is_missed_by_nobody(start_run, tmp_path):
    options = ("--servers", "1", "--strategy", "ps,backup=1")
    running = start_run(SCRIPT, str(EPOCHS), "0.1", workers=3, options=options)
    running.until(lambda: running.shows("epoch 0"), 150)
    running.kill("worker", 0, signal.SIGKILL)
    result = running.wait(150)
    assert result.code == 0, result.err[-3000:]
    assert "worker 0 was killed" in result.err
    assert re.search(rf"\d steps, {EPOCHS * SAMPLES} samples", result.err), result.err
    counted = _counted(_told(tmp_path, (1, 2)))
    for epoch in range(2, EPOCHS):
        assert counted[epoch] == Counter(range(SAMPLES))
    assert all(times == 1 for counts in counted.values() for times in counts.values())


@pytest.mark.timeout(600)
@pytest.mark.case("ps,backup: SIGTERM and --resume")
def test_sigterm_saves_the_ledger_and_another_number_of_workers_takes_the_rest(start_run, tmp_path):
    options = ("--servers", "1", "--strategy", "ps,backup=1", "--name", "first")
    running = start_run(SCRIPT, "12", "0.08", workers=4, options=options)
    running.until(lambda: running.shows("epoch 0"), 150)
    running.kill("worker", 1, signal.SIGTERM)
    stopped = running.wait(150)
    assert stopped.code == 75, stopped.err[-3000:]
    result = start_run(SCRIPT, "12", "0.03", workers=2, options=(*options, "--resume")).wait(150)
    assert result.code == 0, result.err[-3000:]
    told = _told(tmp_path, range(2))
    counted = {e: sum(len(one["ids"].get(str(e), [])) for one in told) for e in range(12)}
    whole = [e for e in range(12) if counted[e] == SAMPLES]
    assert whole == list(range(12))[-len(whole) :]  # and one before them in which the run was stopped
    assert 5 < len(whole) < 12
    assert max(counted.values()) == SAMPLES
    assert 12 * BATCHES <= told[0]["step"] <= 12 * (BATCHES + 3)
