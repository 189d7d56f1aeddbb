"""Runs whose workers train copies (update=local): stopped, resumed, left in the middle, killed."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = """
import sys, time, torch, echelon
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
run = echelon.init()
torch.manual_seed(3)
g = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(44, 6, generator=g), torch.randint(0, 4, (44,), generator=g))
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
model, opt, loader = run.prepare(model, torch.optim.AdamW(model.parameters(), 0.01), DataLoader(data, batch_size=4, shuffle=True))
val = DataLoader(data, batch_size=16)
seen = open(f"seen-{run.rank}", "a")
def judge(model, batch):
    return {"loss": (F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))}
for epoch in run.epochs(int(sys.argv[1])):
    for i, (x, y) in enumerate(loader):
        time.sleep(float(sys.argv[2]) * (3 if run.rank == 0 else 1))
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        print(len(x), file=seen, flush=True)
        if sys.argv[3] == "break" and i == 3:
            break
        if sys.argv[3] == "raise" and epoch == 1 and run.rank == 1:
            raise RuntimeError("on purpose")
    run.print("epoch", epoch, "loss", run.evaluate(model, val, judge)["loss"])
    if epoch == 1 and sys.argv[3] == "save":
        run.checkpoint().wait()
run.save("model")
"""

FORMS = ["local_steps=2", "local_steps=2,outer=diloco", "local_steps=2,outer=geo"]


def options(form: str, *more: str) -> tuple[str, ...]:
    return ("--servers", "1", "--strategy", f"ps,update=local,{form}", "--name", "copies", *more)


def seen(folder: Path) -> int:
    """Samples that all workers stepped on so far."""
    return sum(int(line) for file in folder.glob("seen-*") for line in file.read_text().split())


@pytest.mark.timeout(240)
@pytest.mark.case("ps,update=local: SIGTERM and --resume")
@pytest.mark.parametrize("form", [pytest.param(form, marks=pytest.mark.slow) for form in FORMS])
def test_sigterm_stops_workers_wherever_they_are_and_resume_takes_the_rest(start_run, tmp_path, form):
    running = start_run(SCRIPT, "8", "0.02", "", workers=3, options=options(form))
    running.until(lambda: running.shows("epoch 1"), 90)
    running.kill("worker", 1, signal.SIGTERM)
    stopped = running.wait(60)
    assert stopped.code == 75, stopped.err[-3000:]
    assert 44 < seen(tmp_path) < 8 * 44
    again = start_run(SCRIPT, "8", "0", "", workers=3, options=options(form, "--resume"))
    result = again.wait(90)
    assert result.code == 0, result.err[-3000:]
    assert "epoch 7" in result.out + result.err
    assert seen(tmp_path) == 8 * 44


@pytest.mark.timeout(240)
@pytest.mark.case("ps,update=local: resumed with the same bits")
@pytest.mark.parametrize("form", [FORMS[1], pytest.param(FORMS[0], marks=pytest.mark.slow)])
def test_a_resumed_run_ends_with_the_bits_of_the_one_that_went_on(start_run, tmp_path, form):
    """Each worker's optimizer, and the outer one's momentum, come back."""
    whole = start_run(SCRIPT, "4", "0", "save", workers=3, options=options(form)).wait(90)
    assert whole.code == 0, whole.err[-3000:]
    expected = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    (made,) = (tmp_path / "runs" / "copies" / "checkpoints").glob("step-*")
    shutil.copytree(made, tmp_path / "kept" / made.name)
    from_there = options(form, "--resume", str(tmp_path / "kept" / made.name))
    result = start_run(SCRIPT, "4", "0", "save", workers=3, options=from_there).wait(90)
    assert result.code == 0, result.err[-3000:]
    found = load_file(tmp_path / "model.safetensors")
    assert [k for k in expected if not torch.equal(expected[k], found[k])] == []


@pytest.mark.timeout(120)
@pytest.mark.case("ps,update=local: a loop that is left")
def test_workers_that_leave_a_loop_and_those_that_end_it_go_on_together(start_run, tmp_path):
    """11 batches over 3 workers: two have four and leave at the fourth, one has three and ends."""
    result = start_run(SCRIPT, "3", "0", "break", workers=3, options=options(FORMS[0])).wait(90)
    assert result.code == 0, result.err[-3000:]
    assert "epoch 2" in result.out + result.err


@pytest.mark.timeout(120)
@pytest.mark.case("ps,update=local: a loop that is left")
def test_an_error_in_a_loop_is_told_while_the_others_wait_for_its_worker(start_run):
    running = start_run(SCRIPT, "400", "0.05", "raise", workers=2, options=options(FORMS[0]))
    result = running.wait(60)
    assert result.code == 1
    assert "RuntimeError: on purpose" in result.err[-2500:]


@pytest.mark.timeout(120)
@pytest.mark.case("ps,update=local: a killed worker is named")
@pytest.mark.parametrize("form", [FORMS[0], pytest.param(FORMS[2], marks=pytest.mark.slow)])
def test_a_killed_worker_ends_the_run_with_its_name(start_run, form):
    running = start_run(SCRIPT, "400", "0.05", "", workers=3, options=options(form))
    running.until(lambda: running.shows("epoch 0"), 90)
    running.kill("worker", 2, signal.SIGKILL)
    since = time.monotonic()
    result = running.wait(30)
    assert time.monotonic() - since < 15
    assert result.code == 137
    assert "worker 2" in result.err[-1500:]
