"""A disk that fills up under a run's folder costs records, not the run."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from echelon.elastic import journal
from echelon.elastic.journal import Journal

TRAIN = """
    import os, time
    import torch, echelon

    torch.manual_seed(0)
    run = echelon.init()
    model = torch.nn.Linear(8, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(64, 8, dtype=torch.float64)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data, data.sum(1, keepdim=True)), batch_size=8)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for epoch in run.epochs(10_000):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            time.sleep(0.02)
        if run.reduce(float(os.path.exists("go")), "max"):
            break
"""


def fill(folder: Path) -> None:
    for size in (4096, 1):
        with contextlib.suppress(OSError), (folder / f"full-{size}").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * size)


@pytest.mark.case("a full disk under the run's folder")
@pytest.mark.needs("disk")
def test_servers_and_the_coordinator_are_started_again_on_a_full_disk(small_disk, tmp_path, start_run):
    options = ("--servers", "2", "--strategy", "ps,apply=server")
    running = start_run(TRAIN, options=options, env={"ECHELON_RUNS": str(small_disk)})
    running.run_dir = small_disk / "latest"
    running.until(lambda: running.shows("epoch 0"))
    pids = {
        (p["role"], p["rank"]): p["pid"] for p in json.loads((running.run_dir / "processes.json").read_text())
    }
    fill(small_disk)
    os.kill(pids["server", 0], 9)
    running.until(lambda: running.shows("server 0 has a copy again of what server 1 holds (shard 1)"))
    os.kill(pids["coordinator", 0], 9)
    running.until(lambda: running.shows("the coordinator ended (exit code 137) and is started again"))
    (tmp_path / "go").touch()
    result = running.wait()
    assert result.code == 0, result.err
    said = " ".join(result.err.split())
    assert said.count("cannot write processes.json in the run's folder") == 1
    assert (
        "No space left on device. The run goes on; what `echelon status` shows is old until there is room."
        in said
    )


@pytest.mark.case("a full disk under the run's folder")
@pytest.mark.needs("disk")
def test_the_journal_has_room_of_its_own_and_holds_what_does_not_fit(small_disk, monkeypatch, capsys):
    monkeypatch.setattr(journal, "RESERVED_BYTES", 1 << 16)
    mine = Journal(small_disk / "journal.jsonl")
    fill(small_disk)
    record = {"kind": "set", "key": "k", "value": "v" * 1000}
    for number in range(40):  # within what was reserved
        mine.add(record | {"number": number}, sync=True)
    assert len(mine.path.read_bytes().splitlines()) == 40
    mine.close()
    again = Journal(small_disk / "journal.jsonl")
    for number in range(40, 200):
        again.add(record | {"number": number}, sync=True)
    again.rewrite([record] * 200)  # there is no room for another: the old one stays
    assert capsys.readouterr().err.count("No space left on device") == 1
    kept = [json.loads(line)["number"] for line in again.path.read_text().splitlines()]
    assert kept == list(range(len(kept)))
    assert 40 <= len(kept) < 200
    (small_disk / "full-4096").unlink()
    again.add(record | {"number": 200}, sync=True)
    assert [json.loads(line)["number"] for line in again.path.read_text().splitlines()] == list(range(201))
    again.close()


SAVE = """
    import sys
    import torch, echelon
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    run = echelon.init()
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Tanh(), nn.Linear(1000, 1000, bias=False))  # 8 MB
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(4, 1000)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(TensorDataset(x, x), batch_size=4))
    for epoch in run.epochs(2):
        for a, b in loader:
            run.step(F.mse_loss, (a, b))
        run.save(sys.argv[1])
"""


@pytest.mark.case("a full disk under run.save of a split model")
@pytest.mark.parametrize(("workers", "strategy"), [(3, "pipeline=2+1"), (2, "sharded")])
@pytest.mark.needs("disk")
def test_a_full_disk_keeps_the_file_of_a_split_model(small_disk, echelon_run, workers, strategy):
    target = small_disk / "model.safetensors"
    result = echelon_run(SAVE, str(target), workers=workers, options=("--strategy", strategy), timeout_s=120)
    assert result.code != 0
    said = " ".join(result.err.split())
    assert f"{target} could not be written: rank 0: the disk is full (" in said, result.err
    assert "of 12 MiB are free) Nothing was replaced. Free some space" in said
    assert os.listdir(small_disk) == [target.name], "nothing half is left"
    saved = load_file(target)
    assert sorted(saved) == ["0.weight", "2.weight"]
    assert all(torch.isfinite(t).all() and t.abs().sum() > 0 for t in saved.values())
