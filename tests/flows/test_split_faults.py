"""Models that are split over workers, and a worker that is killed, stopped or asked to stop at a random step: the run ends by
itself, says who it was, leaves nothing, and its last checkpoint loads."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch

from echelon.checkpoint.load import latest
from tests.checkpoint_ranks import read
from tests.conftest import segments, wait_for_nothing

TRAIN = """
    import sys, time
    import torch, echelon
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    torch.set_num_threads(1)
    run = echelon.init()

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(self.norm(x))))

    model = nn.Sequential(nn.Linear(8, 16), Block(), Block(), Block(), nn.Linear(16, 3)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(64, 8, dtype=torch.float64)
    y = torch.randint(0, 3, (64,))
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for epoch in run.epochs(10_000):
        for a, b in loader:
            run.step(F.cross_entropy, (a, b))
            print(f"after step {run.global_step}", flush=True)
            time.sleep(0.01)
"""

FORMS = {
    "sharded": (2, "sharded,level=3"),
    "tensor": (2, "tensor=2"),
    "uneven": (4, "pipeline=3+1,microbatches=4"),
    "mixed": (4, "data=2,pipeline=2,microbatches=2"),
}
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "asked": signal.SIGTERM}
STUCK_S = 2.0


def seeds(form, fault):
    """One of the clock's, printed: ECHELON's own randomness has nothing to do with it."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"{form} {fault}: seed {seed}")
    return random.Random(seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.case("split models: a worker killed, stopped or asked to stop")
@pytest.mark.parametrize("fault", SIGNALS)
@pytest.mark.parametrize("form", FORMS)
def test_a_run_of_a_split_model_ends_by_itself_and_says_why(start_run, tmp_path, form, fault):
    workers, strategy = FORMS[form]
    dice, before = seeds(form, fault), segments()
    victim, at = dice.randrange(workers), dice.randint(4, 30)
    pause_s = dice.uniform(0, 0.05)
    print(f"worker {victim} after step {at} and {pause_s:.3f} s")
    options = (
        "--strategy",
        f"{strategy},checkpoint_every=3",
        "--set",
        f"stuck_s={STUCK_S}",
        "--grace-s",
        "20",
    )
    running = start_run(TRAIN, workers=workers, options=options)
    log = tmp_path / "runs" / "latest" / "logs" / f"worker-{victim}.log"
    running.until(lambda: log.exists() and f"after step {at}\n" in log.read_text(), timeout_s=240)
    running.until(lambda: list(tmp_path.glob("runs/*/checkpoints/*/manifest.json")))
    time.sleep(pause_s)
    running.kill("worker", victim, SIGNALS[fault])
    began = time.monotonic()
    result = running.wait(90)
    print(f"over after {time.monotonic() - began:.1f} s")
    left_s = wait_for_nothing(tmp_path, before, 10.0)
    said = " ".join(result.err.split())
    host = os.uname().nodename.split(".")[0]
    if fault == "killed":
        assert result.code == 137, result.err
        assert f"worker {victim} on {host} was killed by SIGKILL (signal 9)" in said, result.err
        assert "failed by" not in said, "the others failed because of it"
    elif fault == "stopped":
        assert result.code == 124, result.err
        assert f"worker {victim}" in said.split("stuck (")[1].split("meanwhile")[0], result.err
    else:
        assert result.code == 75, result.err
    assert left_s < 10
    # the last complete checkpoint
    saved, _ = latest(result.run_dir / "checkpoints")  # one that was being written is skipped
    assert saved is not None, result.err
    for key in saved.keys():  # noqa: SIM118
        assert torch.isfinite(read(saved, key.name, key.slot).double()).all(), key
