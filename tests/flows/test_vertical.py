"""Columns on two workers as a user has them: shuffled by the run, saved, gone on with elsewhere, killed."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

SCRIPT = """
import os, signal, sys
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
import echelon

run = echelon.init()
torch.set_default_dtype(torch.float64)
g = torch.Generator().manual_seed(1)
x, y = torch.randn(21, 7, generator=g), torch.randint(0, 3, (21,), generator=g)
OF = list("abcdefg")
mine = {0: range(7)} if run.world_size == 1 else {0: [0, 1, 2, 3, 6], 1: [4, 5]}
order = torch.randperm(21, generator=torch.Generator().manual_seed(run.rank))  # in each file another
here = list(mine[run.rank])
target = y[order] if run.rank == 0 else None
table = echelon.Columns(x[order][:, here], [OF[i] for i in here], OF, target=target, ids=order)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
model, optimizer, loader = run.prepare(model, optimizer, DataLoader(table, 4, shuffle=True))
if len(sys.argv) > 2 and sys.argv[2] != "kill":
    run.resume(sys.argv[2])
for epoch in run.epochs(3):
    for a, b in loader:
        loss = run.step(F.cross_entropy, (a, b))
        run.log(loss=loss)
        if sys.argv[-1] == "kill" and run.rank == 1 and run.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
    if epoch == 1:
        run.checkpoint().wait()
run.save(sys.argv[1])
"""
TWO = ("--strategy", "tensor=2")


@pytest.mark.case("vertical: shuffled by the run, saved and resumed as anywhere")
def test_two_workers_shuffle_alike_and_their_checkpoint_goes_on_in_one_process(echelon_run, tmp_path):
    def train(name, workers, options, *source):
        result = echelon_run(
            SCRIPT, str(tmp_path / name), *source, workers=workers,
            options=(*options, "--run-dir", str(tmp_path / f"run-{name}")), timeout_s=120,
        )  # fmt: skip
        assert result.code == 0, result.err
        assert "warning" not in result.err
        return load_file(tmp_path / f"{name}.safetensors"), result.err

    def saved(name):
        return str(max((tmp_path / f"run-{name}" / "checkpoints").iterdir()))

    one, _ = train("one", 1, ())
    two, said = train("two", 2, TWO)
    assert "columns: 5 + 2, a worker each; labels and the other layers: worker 0" in said
    on, _ = train("on", 1, (), saved("two"))
    back, _ = train("back", 2, TWO, saved("one"))
    for other in (two, on, back):
        assert one.keys() == other.keys()
        assert max((one[k] - other[k]).abs().max().item() for k in one) <= 1e-12


@pytest.mark.case("vertical: a killed worker")
def test_a_killed_worker_ends_the_run_with_its_name_and_code(echelon_run, tmp_path):
    result = echelon_run(SCRIPT, str(tmp_path / "x"), "kill", workers=2, options=TWO)
    assert result.code == 137, result.err
    assert "worker 1" in result.err[-1500:]
    assert not (tmp_path / "x.safetensors").exists()
