"""Gradients that are not finite, as a user sees them: counted at the end of a run and in its status, or the run's first error."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.conftest import environment

SCRIPT = """
import torch, echelon
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
run = echelon.init()
torch.manual_seed(3)
g = torch.Generator().manual_seed(1)
x = torch.randn(48, 6, generator=g)
x[[9, 30, 31]] = float("nan")
data = TensorDataset(x, torch.randint(0, 4, (48,), generator=g))
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
model, opt, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.05), DataLoader(data, batch_size=4))
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()
"""


def echelon(folder, *words):
    command = [sys.executable, "-m", "echelon", *words]
    return subprocess.run(
        command, env=environment(folder), cwd=folder, capture_output=True, text=True, check=True, timeout=60
    ).stdout


@pytest.mark.timeout(180)
@pytest.mark.case("nonfinite: seen")
@pytest.mark.case("ps: what servers did is seen")
def test_skipped_updates_are_told_once_and_counted_at_the_end(start_run, tmp_path):
    options = ("--servers", "1", "--strategy", "ps,update=async,nonfinite=skip", "--name", "nan")
    result = start_run(SCRIPT, options=options).wait(90)
    assert result.code == 0, result.err[-3000:]
    assert "2 updates skipped: their gradients were not finite" in result.err
    assert "and 3 more parameters. nonfinite=skip leaves such updates out" in " ".join(result.err.split())
    said = echelon(tmp_path, "status", "nan")
    assert "2 updates skipped: their gradients were not finite" in said
    assert re.search(
        r"  server 0: 12 updates( \([\d.]+/s\))?, [\d.]+ kB in, [\d.]+ kB out( \([\d.]+ kB/s\))?", said
    ), said
    assert re.search(r"  worker 1 .*, waiting \d+%", said)
    told = json.loads(echelon(tmp_path, "status", "nan", "--json"))
    assert told["skipped"] == 2
    (server,) = [process for process in told["processes"] if process["role"] == "server"]
    assert (server["updates"], server["skipped"], sum(server["behind"].values())) == (12, 2, 12)
    events = [json.loads(line) for line in (result.run_dir / "events.jsonl").read_text().splitlines()]
    assert sorted(e["total"] for e in events if e["event"] == "UpdateSkipped") in ([1, 1], [1, 2])


@pytest.mark.timeout(180)
@pytest.mark.case("nonfinite: refused by name")
@pytest.mark.parametrize("strategy", ["allreduce", pytest.param("ps,update=async", marks=pytest.mark.slow)])
def test_the_worker_that_caused_it_is_told_last(start_run, strategy):
    servers = ("--servers", "2") if strategy.startswith("ps") else ()
    result = start_run(SCRIPT, options=(*servers, "--strategy", strategy, "--set", "nonfinite=refuse")).wait(
        90
    )
    assert result.code == 1, result.err[-3000:]
    said = " ".join(result.err[result.err.rindex("NotFinite") :].split())
    assert "the gradient of worker" in said
    assert "and 3 more parameters, and nonfinite=refuse Nothing of this step was applied." in said
    if strategy == "allreduce":
        assert said.startswith("NotFinite: step 3: the gradient of worker 0")
        assert "1 other worker failed as a consequence (1)" in said
