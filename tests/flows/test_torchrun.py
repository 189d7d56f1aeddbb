"""torchrun as the starter: the same run, the same answer, torchrun's exit codes, and nothing left."""

from __future__ import annotations

import json
import re
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import Running, environment, processes_of
from tests.equality import zoo
from tests.equality.test_equality import BOUND, difference, plain
from tests.flows.netns import network

CELLS = Path(__file__).parents[1] / "equality" / "cells.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

FAIL = """
    import sys, echelon
    run = echelon.init()
    print(f"rank {run.rank} of {run.world_size}", flush=True)
    if run.rank == 1:
        raise ValueError("one is too many")
    run.reduce(1.0, "sum")
"""

SLEEP = """
    import time, echelon
    run = echelon.init()
    print(f"up {run.rank}", flush=True)
    time.sleep(300)
"""


def start(folder: Path, *words: str, before: tuple[str, ...] = ()) -> Running:
    return Running(folder, [*before, *TORCHRUN, *words], environment(folder))


def nothing_left(folder: Path, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while left := processes_of(str(folder)):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def check(out: Path, workers: int) -> None:
    for rank in range(workers):
        results = torch.load(out / f"rank-{rank}.pt")
        for case in zoo.CELLS:
            assert difference(results[case][0], plain(case)) <= BOUND


@pytest.mark.case("torchrun as the starter")
def test_two_workers_of_torchrun_end_with_the_weights_of_one_process(tmp_path):
    running = start(tmp_path, "--nproc-per-node", "2", str(CELLS), str(tmp_path))
    result = running.wait(170)
    assert result.code == 0, result.err
    check(tmp_path, 2)
    record = json.loads((running.run_dir / "run.json").read_text())
    assert (record["code"], record["starter"]) == (0, "torchrun")
    assert (running.run_dir / "events.jsonl").read_text().count('"event": "Left"') == 2
    assert not (running.run_dir / "token").exists()
    nothing_left(tmp_path)


@pytest.mark.slow
@pytest.mark.needs("hosts")
def test_two_nodes_of_torchrun_end_with_the_weights_of_one_process(tmp_path):
    with network(2) as net:
        nodes = [
            start(tmp_path, "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint",
                  "10.77.0.1:29555", "--local-addr", host.ipv4, str(CELLS), str(tmp_path), before=tuple(host.command()))
            for host in net.hosts
        ]  # fmt: skip
        for node in nodes:
            result = node.wait(170)
            assert result.code == 0, result.err
        check(tmp_path, 2)
        record = json.loads((nodes[0].run_dir / "run.json").read_text())
        assert record["coordinator"].startswith("10.77.0.")
        nothing_left(tmp_path)


def test_a_failing_script_ends_with_torchruns_code_and_its_traceback(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(FAIL))
    running = start(tmp_path, "--nproc-per-node", "2", "train.py")
    result = running.wait(60)
    assert result.code == 1
    assert "ValueError: one is too many" in result.err
    nothing_left(tmp_path)


def test_the_coordinator_ends_with_rank_0(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SLEEP))
    running = start(tmp_path, "--nproc-per-node", "2", "train.py")
    running.until(lambda: running.shows("up 0") and running.shows("up 1"), 60)
    running.kill("supervisor")  # rank 0 stands in for it
    assert running.wait(60).code == 1
    nothing_left(tmp_path)


def test_rank_0_shows_the_run_as_plain_python_does(tmp_path):
    train = """
        import torch, echelon
        run = echelon.init()
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
        model, optimizer, loader = run.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(train))
    result = start(tmp_path, "--nproc-per-node", "2", "train.py").wait(60)
    assert result.code == 0, result.err
    assert result.err.count("global batch 8 samples a step · 4 a worker") == 1
    assert re.search(r"trained 8 steps, 64 samples, .* last loss 0\.\d+", re.sub(r"\s+", " ", result.err))


@pytest.mark.slow
def test_a_second_try_of_torchrun_is_a_run_of_its_own(tmp_path):
    once = SLEEP.replace("time.sleep(300)", """
    import os
    if run.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(3)
    print("sum", float(run.reduce(1.0, "sum")))
    """)  # fmt: skip
    (tmp_path / "train.py").write_text(textwrap.dedent(once))
    running = start(tmp_path, "--nproc-per-node", "2", "--max-restarts", "1", "train.py")
    result = running.wait(120)
    assert result.code == 0, result.err
    assert result.out.count("up 0") == 2
    nothing_left(tmp_path)


def test_ctrl_c_at_torchrun_leaves_nothing(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SLEEP))
    running = start(tmp_path, "--nproc-per-node", "2", "train.py")
    running.until(lambda: running.shows("up 0") and running.shows("up 1"), 60)
    running.process.send_signal(signal.SIGINT)
    assert running.wait(60).code != 0
    nothing_left(tmp_path)


def test_a_run_of_ours_is_not_taken_for_torchruns(echelon_run):
    """RANK and WORLD_SIZE are set by `echelon run` as well, and torchrun's own variables may be inherited."""
    around = {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    result = echelon_run("import echelon; r = echelon.init(); print('size', r.world_size)", env=around)
    assert result.code == 0, result.err
    assert "size 2" in result.out
