"""Servers that die where the first parts make an update (backup, aggregate): their copies know which, and every sample is in one update."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import Running, segments, stand_still, wait_for_nothing
from tests.equality.killing import Killer
from tests.flows.test_backup import BATCHES, SAMPLES, SCRIPT
from tests.flows.test_servers import processes
from tests.flows.test_storm import pause

COUNTED = (
    SCRIPT.replace(
        "        opt.zero_grad()\n",
        "        opt.zero_grad()\n        print(time.monotonic(), file=times, flush=True)\n",
    ).replace("run = echelon.init()\n", "run = echelon.init()\ntimes = open(f'times-{run.rank}', 'a')\n")
    + """
from tests.runs import updates_of_servers
json.dump(updates_of_servers(run), open(f"updates-{run.rank}.json", "w"))
"""
)
SLOW_S = "0.15"


def begun(start_run, strategy: str, epochs: int, seed: int) -> tuple[Running, Killer]:
    options = ("--servers", "2", "--strategy", strategy, "--name", "copied")
    running = start_run(COUNTED, str(epochs), SLOW_S, workers=3, options=options)
    running.until(lambda: running.shows("epoch 0"), 150)
    killer = Killer(running.run_dir, seed)
    running.until(killer.whole, 60)
    return running, killer


def back(running: Running, killer: Killer) -> None:
    """The run knows that a server was killed, and has started it again: every shard has a copy."""
    running.until(lambda: not killer.whole(), 30)
    running.until(killer.whole, 60)


def check(folder: Path, epochs: int, ranks: Sequence[int], since: int = 0) -> None:
    """All samples of epochs in which only these workers were there, and none twice in the others."""
    told = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in ranks]
    for epoch in range(epochs):
        seen = Counter(i for one in told for i in one["ids"].get(str(epoch), []))
        assert set(seen.values()) == {1}
        assert epoch < since or len(seen) == SAMPLES, (epoch, set(range(SAMPLES)) - set(seen))
    assert len({one["sum"] for one in told}) == 1
    assert len({one["step"] for one in told}) == 1
    updates = {n for rank in ranks for n in json.loads((folder / f"updates-{rank}.json").read_text())}
    assert len(updates) == 1
    assert updates.pop() >= told[0]["step"] >= epochs * BATCHES


@pytest.mark.timeout(600)
@pytest.mark.case("ps,backup: kill -9 of the server that decides, and of the other")
@pytest.mark.parametrize(
    "strategy",
    ["ps,backup=1", pytest.param("ps,aggregate=5,clip_norm=0.5", marks=pytest.mark.slow)],
)
def test_killed_servers_cost_no_sample_and_no_update(start_run, tmp_path, strategy):
    left, epochs = segments(), 24
    running, killer = begun(start_run, strategy, epochs, 7)
    for rank in (0, 1):
        running.kill("server", rank)
        back(running, killer)
    result = running.wait(300)
    assert result.code == 0, result.err[-3000:]
    said = " ".join(result.err.split())
    assert "server 1 has a copy and goes on in its place" in said
    assert "server 0 has a copy and goes on in its place" in said
    check(tmp_path, epochs, range(3))
    wait_for_nothing(result.run_dir, left, 20)


@pytest.mark.timeout(600)
@pytest.mark.case("ps,backup: a worker is killed together with the server that decides")
@pytest.mark.parametrize("worker", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_worker_killed_with_the_server_that_decides_is_missed_by_nobody(start_run, tmp_path, worker):
    """Its part may be held, counted or neither; it never comes to the server that takes over."""
    epochs = 12
    running, killer = begun(start_run, "ps,backup=1", epochs, 7)
    listed = processes(running.run_dir)
    pids = [listed["worker", worker]["pid"], listed["server", 0]["pid"]]
    for pid in pids:
        stand_still(pid)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    back(running, killer)
    result = running.wait(300)
    assert result.code == 0, result.err[-3000:]
    assert re.search(rf"\d steps, {epochs * SAMPLES:,} samples", result.err), result.err
    check(tmp_path, epochs, [rank for rank in range(3) if rank != worker], since=4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.case("ps,backup: random kills of servers")
@pytest.mark.parametrize("strategy", ["ps,backup=1", "ps,aggregate=4"])
def test_random_kills_cost_no_sample_and_no_update(start_run, tmp_path, strategy):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    epochs, kills = 100, 8
    hit: list[float] = []
    running, killer = begun(start_run, strategy, epochs, seed)
    for _ in range(kills):
        time.sleep(0.5 * killer.rng.random())
        hit.append(time.monotonic())
        os.kill(processes(running.run_dir)["server", killer.rng.randrange(2)]["pid"], signal.SIGKILL)
        back(running, killer)
    result = running.wait(600)
    assert result.code == 0, result.err[-3000:]
    steps = sorted(float(x) for file in tmp_path.glob("times-*") for x in file.read_text().split())
    pauses = sorted(pause(steps, when) for when in hit)
    print(f"{kills} servers: p50 {statistics.median(pauses):.2f} s, max {pauses[-1]:.2f} s")
    assert statistics.median(pauses) < 1.0
    check(tmp_path, epochs, range(3))
