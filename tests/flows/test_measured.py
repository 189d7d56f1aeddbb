"""Bytes a step and peak memory a worker: what was measured beside what was predicted, in the summary and in the record of a run."""

from __future__ import annotations

import pytest

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import echelon

width, layers, rows = map(int, sys.argv[1:4])
run = echelon.init()
with run.build():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(3 * 8, rows // 8, width, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(x, x.roll(1, -1)), batch_size=8)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for batch in loader:
    run.step(nn.functional.mse_loss, batch)
"""

WIDTH, LAYERS = 1024, 12


def trained(echelon_run, strategy, workers, servers=0, width=WIDTH, layers=LAYERS, rows=8):
    """What each worker measured, and the lines of the summary that say so. `rows` of a batch."""
    options = ("--strategy", strategy, *(("--servers", str(servers)) if servers else ()))
    args = str(width), str(layers), str(rows)
    result = echelon_run(SCRIPT, *args, workers=workers, options=options, timeout_s=300)
    assert result.code == 0, result.err
    found = result.record["measured"]
    assert sorted(found) == [str(rank) for rank in range(workers)]
    said = [line for line in result.err.splitlines() if line.startswith(("  a step moves", "  memory, at"))]
    assert len(said) == 2, result.err
    assert "predicted" in said[0]
    assert "before activations" not in said[1]
    assert all(len(line) <= 80 for line in said)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "workers", "servers"),
    [
        ("allreduce,compress=int8", 2, 0), ("allreduce,accumulate=3", 2, 0), ("ps", 2, 1), ("ps,servers_share=1", 2, 1),
        ("ps,update=bounded,staleness=1", 2, 1), ("sharded,level=1", 3, 0), ("sharded,level=2", 2, 0),
        ("sharded,level=3,wrap_mib=8", 2, 0), ("sharded,level=3,wrap_mib=8,microbatches=2", 2, 0),
        ("sharded,shard_workers=2,wrap_mib=8", 4, 0), ("tensor=2", 2, 0), ("data=2,tensor=2", 4, 0),
        ("pipeline=2,microbatches=4,schedule=gpipe", 2, 0), ("pipeline=2,microbatches=4,schedule=zero-bubble", 2, 0),
        ("pipeline=2,microbatches=4,schedule=interleaved", 2, 0), ("pipeline=3+1,microbatches=4", 4, 0),
        ("data=2,pipeline=2,microbatches=2", 4, 0), ("tensor=2,pipeline=2,microbatches=2", 4, 0),
    ],
)  # fmt: skip
def test_a_step_moves_what_was_predicted_under_every_form(echelon_run, strategy, workers, servers):
    assert_bytes(trained(echelon_run, strategy, workers, servers, width=512, layers=8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "workers", "servers"),
    [("ps", 2, 1), ("sharded,level=2", 2, 0), ("tensor=2", 2, 0), ("data=2,tensor=2", 4, 0), ("pipeline=3+1,microbatches=4", 4, 0)],
)  # fmt: skip
def test_a_worker_needs_what_was_predicted_under_further_forms(echelon_run, strategy, workers, servers):
    assert_peak(trained(echelon_run, strategy, workers, servers))


LARGE = 32768
"""Rows of a batch with which what forwards keep is most of what a worker needs."""


def assert_large(found):
    """Of the prediction a third and more are activations, and without them it would be far too low."""
    assert_peak(found)
    for one in found:
        assert one["activation_bytes"] > 100 << 20
        assert one["peak_bytes"] > 1.3 * (one["peak_bytes_expected"] - one["activation_bytes"])


@pytest.mark.case("peak memory with large batches, predicted and measured")
@pytest.mark.parametrize("strategy", ["allreduce", "pipeline=2,microbatches=4,schedule=gpipe"])
def test_with_large_batches_activations_are_in_the_prediction(echelon_run, strategy):
    assert_large(trained(echelon_run, strategy, 2, width=128, layers=16, rows=LARGE))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "workers", "servers"),
    [
        ("ps", 2, 1), ("ps,apply=server", 2, 1), ("allreduce,accumulate=2", 2, 0), ("allreduce,microbatches=2", 2, 0),
        ("sharded,level=1", 2, 0), ("sharded,level=2", 2, 0), ("sharded,level=3", 2, 0), ("tensor=2", 2, 0),
        ("pipeline=2,microbatches=4", 2, 0), ("pipeline=2,microbatches=4,schedule=zero-bubble", 2, 0),
        ("pipeline=2,microbatches=4,schedule=interleaved", 2, 0), ("pipeline=3+1,microbatches=4", 4, 0),
        ("data=2,pipeline=2,microbatches=2", 4, 0), ("tensor=2,pipeline=2,microbatches=2", 4, 0),
    ],
)  # fmt: skip
def test_they_are_under_further_forms(echelon_run, strategy, workers, servers):
    rows = LARGE * 2 if workers > 2 or "accumulate" in strategy or "microbatches" in strategy else LARGE
    assert_peak(trained(echelon_run, strategy, workers, servers, width=128, layers=16, rows=rows))


RECOMPUTED = SCRIPT.replace(
    "run.step(nn.functional.mse_loss, batch)",
    """
    from torch.utils.checkpoint import checkpoint
    nn.functional.mse_loss(checkpoint(model, batch[0], use_reentrant=False), batch[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
""".strip(),
)


def test_what_could_not_be_counted_is_said_to_be_left_out(echelon_run):
    result = echelon_run(RECOMPUTED, "64", "2", "8", workers=2)
    assert result.code == 0, result.err
    assert "before activations" in result.err
    assert all("activation_bytes" not in one for one in result.record["measured"].values())


def test_a_run_of_one_worker_moves_nothing_and_says_only_its_memory(echelon_run):
    result = echelon_run(SCRIPT, "64", "2", "8", workers=1)
    assert result.code == 0, result.err
    assert result.record["measured"]["0"]["step_bytes"] == 0
    assert "a step moves" not in result.err
    assert "  memory, at most" in result.err
