"""Bytes a step and peak memory a worker: what was measured beside what was predicted, in the summary and in the record of a run."""

from __future__ import annotations

import pytest

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import echelon

width, layers = int(sys.argv[1]), int(sys.argv[2])
run = echelon.init()
with run.build():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(24, width, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=8)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for batch in loader:
    run.step(nn.functional.mse_loss, batch)
"""

WIDTH, LAYERS = 1024, 12


def trained(echelon_run, strategy, workers, servers=0, width=WIDTH, layers=LAYERS):
    """What each worker measured, and the lines of the summary that say so."""
    options = ("--strategy", strategy, *(("--servers", str(servers)) if servers else ()))
    args = str(width), str(layers)
    result = echelon_run(SCRIPT, *args, workers=workers, options=options, timeout_s=300)
    assert result.code == 0, result.err
    found = result.record["measured"]
    assert sorted(found) == [str(rank) for rank in range(workers)]
    said = [line for line in result.err.splitlines() if line.startswith(("  a step moves", "  memory, at"))]
    assert len(said) == 2, result.err
    assert all("predicted" in line and len(line) <= 80 for line in said)
    return found.values()


def assert_bytes(found):
    for one in found:
        assert one["step_bytes"] == pytest.approx(one["step_bytes_expected"], rel=0.05)


def assert_peak(found):
    for one in found:
        assert one["peak_bytes"] == pytest.approx(one["peak_bytes_expected"], rel=0.15)


@pytest.mark.case("bytes a step and peak memory, predicted and measured")
@pytest.mark.parametrize(
    ("strategy", "servers"), [("allreduce", 0), ("ps,apply=server", 1), ("pipeline=2,microbatches=2", 0)]
)
def test_what_is_measured_is_what_was_predicted(echelon_run, strategy, servers):
    found = trained(echelon_run, strategy, 2, servers)
    assert_bytes(found)
    assert_peak(found)


def test_a_run_of_one_worker_moves_nothing_and_says_only_its_memory(echelon_run):
    result = echelon_run(SCRIPT, "64", "2", workers=1)
    assert result.code == 0, result.err
    assert result.record["measured"]["0"]["step_bytes"] == 0
    assert "a step moves" not in result.err
    assert "  memory, at most" in result.err
