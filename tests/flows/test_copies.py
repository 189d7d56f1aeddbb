"""Servers that die in a run, with a copy of what they held on another one (replicas=1)."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.conftest import segments, stand_still, wait_for_nothing
from tests.equality.killing import Killer
from tests.flows.test_apart import SCRIPT, _seen
from tests.flows.test_servers import processes


def begun(start_run, strategy: str, epochs: str, servers: int = 2, workers: int = 2):
    options = ("--servers", str(servers), "--strategy", strategy, "--name", "copied")
    running = start_run(SCRIPT, epochs, workers=workers, options=options)
    running.until(lambda: running.shows("epoch 0"), 90)
    return running, Killer(running.run_dir, seed=7)


@pytest.mark.timeout(240)
@pytest.mark.case("ps: kill -9 of a server with a copy")
@pytest.mark.parametrize(
    "strategy", ["ps,update=async", pytest.param("ps,update=bounded,staleness=2", marks=pytest.mark.slow)]
)
def test_workers_go_on_with_the_copy_and_a_new_server_is_filled(start_run, tmp_path, strategy):
    before = segments()
    running, killer = begun(start_run, strategy, "40")
    running.until(killer.whole, 60)
    first = processes(running.run_dir)["server", 0]["pid"]
    running.kill("server", 0)
    running.until(lambda: running.shows("goes on in its place"), 30)
    running.until(lambda: processes(running.run_dir)["server", 0]["pid"] != first, 30)
    running.until(killer.whole, 60)
    running.kill("server", 1)
    result = running.wait(120)
    assert result.code == 0, result.err[-3000:]
    if "async" in strategy:
        assert _seen(tmp_path) == 40 * 44
    said = " ".join(result.err.split())
    assert "server 1 has a copy and goes on in its place" in said
    assert re.search(r"server \d has a copy again of what server \d holds", said)
    found = processes(result.run_dir)
    assert [found["server", rank]["incarnation"] for rank in range(2)] == [1, 1]
    wait_for_nothing(result.run_dir, before, 10)


@pytest.mark.timeout(240)
@pytest.mark.case("ps: both copies gone at once")
def test_both_copies_at_once_is_an_honest_stop(start_run):
    before = segments()
    running, killer = begun(start_run, "ps,apply=server", "60")
    running.until(killer.whole, 60)
    pids = [processes(running.run_dir)["server", rank]["pid"] for rank in range(2)]
    for pid in pids:
        stand_still(pid)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    result = running.wait(60)
    assert time.monotonic() - began < 30
    assert result.code not in (0, 75), result.err[-2000:]
    said = " ".join(result.err.split())
    assert "the parameters on server" in said, result.err[-2500:]
    assert "no other server had a whole copy" in said
    assert "--resume" in said, result.err
    wait_for_nothing(result.run_dir, before, 10)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_copy_that_stands_still_is_done_without_and_filled_when_it_goes_on(start_run):
    running, killer = begun(start_run, "ps,apply=server,stuck_s=60", "60")
    running.until(killer.whole, 60)
    pid = processes(running.run_dir)["server", 1]["pid"]
    stand_still(pid)
    time.sleep(5)
    os.kill(pid, signal.SIGCONT)
    result = running.wait(200)
    assert result.code == 0, result.err[-2000:]
