"""Killed workers are started again and take their seats in the running run: real processes, kill -9, and the same bits."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conftest import Result, Running, leftovers, segments
from tests.flows.netns import network
from tests.flows.site import at, ends, said

TRAIN = """
    import sys, time
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    import echelon
    from tests.runs import values_come_behind

    values_come_behind()
    pause_s, epochs, judged = float(sys.argv[1]), int(sys.argv[2]), len(sys.argv) > 3
    run = echelon.init(seed=3)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(12, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)
    ).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(200, 12, generator=g, dtype=torch.float64), torch.randint(0, 4, (200,), generator=g)
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, batch_size=20, shuffle=True)
    model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)

    def judge(model, batch):
        time.sleep(pause_s)
        return {"loss": (float(F.cross_entropy(model(batch[0]), batch[1], reduction="sum")), len(batch[1]))}

    for epoch in run.epochs(epochs):
        for inputs, target in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            run.clip_grad_norm(model, 1.0)
            optimizer.step()
            scheduler.step()
            time.sleep(pause_s)
        if judged:
            run.print(f"judges {epoch}")
            told = run.evaluate(model, torch.utils.data.DataLoader(data, batch_size=20), judge)
            run.print(f"judged {epoch} {told['loss']:.15f}")
    here = torch.ones(1)
    torch.distributed.all_reduce(here)
    assert here.item() == run.world_size
    run.save("weights")
"""

SERVED = ("--servers", "2", "--strategy", "ps,apply=server,replicas=0")
WAIT_S = 120.0
END_S = 240.0
Start = Callable[..., Running]


def events(running: Running, kind: str) -> list[dict]:
    try:
        lines = (running.run_dir / "events.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [event for line in lines if f'"{kind}"' in line and (event := json.loads(line))["event"] == kind]


def at_step(running: Running, step: int) -> None:
    """Blocks until the run has made so many steps."""
    running.until(lambda: any(beat["step"] >= step for beat in events(running, "Beat")), WAIT_S)


def num_back(running: Running) -> int:
    return sum(len(event["ranks"]) for event in events(running, "WorkersBack"))


def kill(running: Running, rank: int) -> int:
    """kill -9, and blocks until its successor is started; its pid."""
    assert running.process.poll() is None, "the run is over"
    pid = running.until(lambda: running.pid("worker", rank))
    os.kill(pid, signal.SIGKILL)
    return int(running.until(lambda: (now := running.pid("worker", rank)) and now != pid and now, WAIT_S))


def weights(folder: Path) -> dict:
    return load_file(folder / "weights.safetensors")


def calm_weights(start_run: Start, folder: Path, *args: str) -> tuple[dict, Result]:
    result = start_run(TRAIN, *args, workers=3, options=SERVED).wait(END_S)
    assert result.code == 0, result.err
    found = weights(folder)
    (folder / "weights.safetensors").unlink()
    return found, result


def check(result: Result, folder: Path, calm: dict, epochs: int, before: set[str]) -> None:
    """The same bits, every sample once, and nothing left."""
    assert result.code == 0, result.err
    stormy = weights(folder)
    assert stormy.keys() == calm.keys()
    differ = [name for name, x in calm.items() if not (x == stormy[name]).all()]
    assert differ == [], (differ, result.err)
    done = [e for e in result.events if e["event"] == "EpochDone"]
    assert {(e["committed"], e["expected"]) for e in done} == {(200, 200)}
    assert {e["epoch"] for e in done} == set(range(epochs))
    assert leftovers(folder, before) == []


@pytest.mark.timeout(600)
@pytest.mark.case("again: no bit is changed")
@pytest.mark.case("again: killed on its way back")
def test_killed_workers_are_started_again_and_no_bit_is_changed(start_run, tmp_path):
    seed = int(os.environ.get("AGAIN_SEED", "7"))
    rng, before = random.Random(seed), segments()
    print(f"seed {seed}")
    calm, _ = calm_weights(start_run, tmp_path, "0", "5")
    running = start_run(TRAIN, "0.2", "5", workers=3, options=SERVED)
    running.until(lambda: running.shows("same answer"), WAIT_S)  # else the calm run is the latest
    # in mid-step
    at_step(running, rng.randint(1, 6))
    time.sleep(rng.uniform(0, 0.1))
    first = rng.randrange(3)
    kill(running, first)
    running.until(lambda: num_back(running) == 1, WAIT_S)
    # one that was started again, then on its way back once more, then another one beside it
    at_step(running, rng.randint(12, 16))
    kill(running, first)
    time.sleep(rng.uniform(0, 1.5))
    kill(running, first)
    time.sleep(rng.uniform(0, 1.5))
    kill(running, (first + 1) % 3)
    result = running.wait(END_S)
    check(result, tmp_path, calm, 5, before)
    assert "is started again; the others wait for it" in re.sub(r"\s+", " ", result.err)
    assert re.search(r"workers? \d(, \d)? back at step \d+, [\d.]+ s after the loss", result.err)
    back = [e for e in result.events if e["event"] == "WorkersBack"]
    print("pauses", [round(e["pause_s"], 1) for e in back])
    processes = {
        (p["role"], p["rank"]): p for p in json.loads((result.run_dir / "processes.json").read_text())
    }
    assert [processes["worker", r]["incarnation"] for r in (first, (first + 1) % 3, (first + 2) % 3)] == [
        3,
        1,
        0,
    ]
    assert [processes["worker", r]["code"] for r in range(3)] == [0, 0, 0]
    assert "4 workers were started again" in result.err
    assert "50 steps, 1,000 samples" in result.err


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.case("again: evaluate and save")
def test_a_worker_killed_in_an_evaluation_takes_part_in_it_again(start_run, tmp_path):
    before = segments()
    calm, told = calm_weights(start_run, tmp_path, "0", "2", "judged")
    running = start_run(TRAIN, "0.2", "2", "judged", workers=3, options=SERVED)
    running.until(lambda: running.shows("judges 0"), WAIT_S)
    kill(running, 1)
    result = running.wait(END_S)
    check(result, tmp_path, calm, 2, before)
    judged = [line for line in told.out.splitlines() if "judged" in line]
    assert len(judged) == 2
    assert [line for line in result.out.splitlines() if "judged" in line] == judged


@pytest.mark.case("again: an exception ends the run")
def test_a_worker_whose_script_raises_is_not_started_again(start_run, tmp_path):
    script = TRAIN.replace(
        "            scheduler.step()\n",
        "            scheduler.step()\n            if run.rank == 1 and run.global_step == 3: raise ValueError('mine')\n",
    )
    result = start_run(script, "0", "2", workers=3, options=SERVED).wait(WAIT_S)
    assert result.code == 1, result.err
    assert "ValueError: mine" in result.err
    assert "started again" not in result.err


@pytest.mark.case("again: killed before the first batch")
def test_a_worker_killed_before_the_first_batch_ends_the_run(start_run, tmp_path):
    script = TRAIN.replace(
        "    run = echelon.init(seed=3)\n", "    run = echelon.init(seed=3)\n    time.sleep(60)\n"
    )
    before = segments()
    running = start_run(script, "0", "1", workers=3, options=SERVED)
    running.until(lambda: events(running, "Configured"), WAIT_S)  # all have met in init
    running.kill("worker", 2)
    result = running.wait(WAIT_S)
    assert result.code == 137
    assert re.search(r"worker 2 on \S+ was killed by SIGKILL", re.sub(r"\s+", " ", result.err)), result.err
    assert "is started again" not in result.err
    told = re.sub(r"\s+", " ", result.err)
    assert "It was not started again: before the first batch there is no place" in told, result.err
    assert leftovers(tmp_path, before) == []


@pytest.mark.timeout(600)
@pytest.mark.case("again: killed before anybody met it")
def test_a_worker_killed_while_it_imports_is_started_again_and_nobody_notices(start_run, tmp_path):
    script = """
    import os, signal
    from pathlib import Path
    once = Path("killed")
    if os.environ["ECHELON_RANK"] == "1" and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    running = start_run(script + TRAIN, "0", "2", workers=2, options=SERVED)
    result = running.wait(END_S)
    assert result.code == 0, result.err
    assert "worker 1 was killed (signal 9) before it met the others and is started again" in said(running)
    assert re.search(r"steps, 400 samples", result.err), result.err
    assert weights(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.case("again: on another host")
@pytest.mark.needs("hosts")
def test_workers_killed_on_either_host_are_started_again_there(tmp_path):
    with network(2) as net:
        for site in at(net, tmp_path):
            site.script(TRAIN)
            saved = site.home(0) / "weights.safetensors"
            found = []
            for pause_s, killed in (("0", ()), ("0.2", (3, 0))):
                first = site.run(pause_s, "5", workers=4, options=SERVED)
                other = site.join(1)
                for done, rank in enumerate(killed):
                    at_step(first, 2 + 8 * done)
                    kill(first, rank)
                    first.until(lambda n=done: num_back(first) == n + 1, WAIT_S)  # noqa: B023
                ends(first, 0, END_S)
                ends(other, 0, WAIT_S)
                found.append(load_file(saved))
                saved.unlink()
                site.wait_for_nothing()
                if killed:
                    assert "worker 3 on h1 was killed (signal 9)" in said(first)
                shutil.rmtree(tmp_path / "runs")
            calm, stormy = found
            assert [name for name, x in calm.items() if not (x == stormy[name]).all()] == []


@pytest.mark.slow
@pytest.mark.case("again: nobody left")
def test_when_all_are_killed_the_run_ends_and_names_one(start_run, tmp_path):
    before = segments()
    running = start_run(TRAIN, "0.05", "20", workers=2, options=SERVED)
    at_step(running, 3)
    for rank in range(2):
        os.kill(running.until(lambda r=rank: running.pid("worker", r)), signal.SIGKILL)
    result = running.wait(END_S)
    assert result.code == 137, result.err
    assert re.search(r"worker \d on \S+ was killed by SIGKILL", re.sub(r"\s+", " ", result.err)), result.err
    assert leftovers(tmp_path, before) == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.case("again: a storm")
def test_a_storm_of_20_kills(start_run, tmp_path):
    seed = int(os.environ.get("AGAIN_SEED", str(random.randrange(1000))))
    rng, before = random.Random(seed), segments()
    print(f"seed {seed}")
    options = (*SERVED, "--set", "checkpoint_every=7")
    calm, _ = calm_weights(start_run, tmp_path, "0", "40")
    shutil.rmtree(tmp_path / "runs")
    running = start_run(TRAIN, "0.05", "40", workers=3, options=options)
    at_step(running, 1)
    kills, whole_at, anchor = 0, 0, 0
    while kills < 20:
        time.sleep(rng.uniform(0.05, 1.5))
        if num_back(running) != whole_at or not kills:
            whole_at, anchor = num_back(running), rng.randrange(3)  # one knows the place until all are back
        elif rng.random() < 0.7:
            continue
        kill(running, rng.choice([rank for rank in range(3) if rank != anchor]))
        kills += 1
        if rng.random() < 0.5:
            running.until(lambda: num_back(running) != whole_at, WAIT_S)  # noqa: B023
    result = running.wait(600)
    check(result, tmp_path, calm, 40, before)
    pauses = sorted(e["pause_s"] for e in result.events if e["event"] == "WorkersBack")
    print(f"{len(pauses)} pauses, median {pauses[len(pauses) // 2]:.1f} s, longest {pauses[-1]:.1f} s")
