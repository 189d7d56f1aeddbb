"""A link between two hosts dies while both still reach the first host: both ends are named, in time, then exit code 124."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Running
from tests.flows.netns import network
from tests.flows.site import Site, at, ends, said, shown

TRAIN = """
    import sys, time, torch, echelon
    run = echelon.init()
    model = torch.nn.Linear(4, 2)
    data = torch.utils.data.TensorDataset(torch.randn(640, 4), torch.randint(0, 2, (640,)))
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.DataLoader(data, batch_size=8))
    for epoch in run.epochs(9999):
        for x, y in loader:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.05)
            if run.global_step == 20 and run.is_main:
                print("at step 20", flush=True)
"""
NAMED_S = 15.0
"""max(3 × median step, 10 s) + 5 s, with steps of about a twentieth of a second."""


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Site]:
    with network(3) as net:
        yield from at(net, tmp_path)


def start(site: Site, *options: str) -> list[Running]:
    site.script(TRAIN)
    running = [site.run(workers=3, options=options), site.join(1), site.join(2)]
    shown(running[0], "at step 20", 120)
    return running


def alarms(site: Site) -> list[dict]:
    lines = (site.folder / "runs" / "it" / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == "Stuck"]


@pytest.mark.case("stuck: a dead link")
@pytest.mark.case("stuck: exit code 124")
@pytest.mark.case("USERS 1")
@pytest.mark.needs("hosts")
def test_both_ends_of_a_dead_link_are_named_and_the_run_stops_with_124(three):
    site = three
    running = start(site, "--set", "stuck_s=1")
    site.hosts[1].cut(site.hosts[2])
    cut = time.time()
    text = ends(running[0], 124, 60)
    (told,) = alarms(site)
    after_s = told["time"] - cut
    print(f"named {after_s:.1f} s after the cut: {told['reason']}")
    assert (told["kind"], told["ranks"], told["rank"]) == ("link", [1, 2], None)
    assert 9.0 < after_s < NAMED_S
    processes = json.loads((site.folder / "runs" / "it" / "processes.json").read_text())
    pids = {p["rank"]: p["pid"] for p in processes if p["role"] == "worker"}
    ways = [(1, 2, "10.77.0.3"), (2, 1, "10.77.0.2")]
    assert any(
        f"worker {a} on h{a} (pid {pids[a]}) gets no answer from worker {b} on h{b} (pid {pids[b]}) at {address} since"
        in told["reason"]
        for a, b, address in ways
    )
    assert len(told["others"]) == 3
    for rank, line in enumerate(told["others"]):
        place = rf"worker {rank} \(h{rank}:{pids[rank]}\) waits in all_reduce of gradients \(number \d+\) since \d+ s"
        assert re.match(rf"{place} at .*train.py:\d+ in <module>", line), line
    assert told["step"] >= 20
    assert text.count(f"stuck (link): workers 1 and 2 do not reach each other at step {told['step']}") == 2
    assert text.rstrip().endswith("The run was stopped 1 s after the alarm (exit code 124).")
    for other in running[1:]:
        ends(other, 124)
    site.wait_for_nothing()


@pytest.mark.slow
@pytest.mark.case("stuck: a dead link")
@pytest.mark.case("stuck: goes on")
@pytest.mark.needs("hosts")
def test_a_link_that_comes_back_calls_the_stop_off(three):
    site = three
    running = start(site, "--set", "stuck_s=60")
    site.hosts[1].cut(site.hosts[2])
    shown(running[0], "stuck (link): workers 1 and 2 do not reach each other", 60)
    site.hosts[1].mend()
    shown(running[0], "goes on, ", 60)
    assert [alarm["kind"] for alarm in alarms(site)] == ["link"], said(running[0])
