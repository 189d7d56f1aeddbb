"""Workers and servers killed between two optimizer steps of one iteration (apply=server): the whole iteration runs again, bit for bit."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import Result, leftovers, segments
from tests.flows.test_again import END_S, WAIT_S, Start, at_step
from tests.flows.test_storm import Storm

TRAIN = """
    import json, os, signal, sys, time
    from pathlib import Path
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    import echelon
    from tests.runs import values_come_behind, when_servers_stepped

    values_come_behind()
    kind, pause_s, epochs, plan = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    run = echelon.init(seed=3)
    torch.manual_seed(0)
    make = nn.Sequential(
        nn.Linear(6, 24, bias=False), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 4)
    ).double()
    tell = nn.Sequential(nn.Linear(4, 24), nn.LeakyReLU(), nn.Linear(24, 1)).double()
    both = nn.ModuleDict({"make": make, "tell": tell}) if kind == "halves" else None
    second = torch.optim.Adam(make.parameters(), lr=1e-2)
    first = torch.optim.Adam(tell.parameters(), lr=1e-2)
    if kind == "one":  # one optimizer over two models
        first = torch.optim.AdamW([*tell.parameters(), *make.parameters()], lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(first, 5, 0.9)
    g = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(100, 4, generator=g, dtype=torch.float64), torch.randn(100, 6, generator=g, dtype=torch.float64)
    )
    loader = torch.utils.data.DataLoader(data, batch_size=10, shuffle=True)
    run.prepare(*([both] if both is not None else [make, tell]))
    optimizers = run.prepare(first) if kind == "one" else run.prepare(first, second)
    loader, schedule = run.prepare(loader, schedule)
    bce = F.binary_cross_entropy_with_logits

    def killed(where):
        for at, entry in enumerate(plan):  # worker@step.place, each once, or server1@step.place
            who, _, when = entry.partition("@")
            mark, mine = Path(f"killed-{at}"), run.rank == (0 if who.startswith("server") else int(who))
            if mine and when == f"{run.global_step}.{where}" and not mark.exists():
                mark.touch()
                os.kill(pid_of(who), signal.SIGKILL)

    def pid_of(who):
        listed = json.loads((Path(os.environ["ECHELON_RUN_DIR"]) / "processes.json").read_text())
        alive = [p["pid"] for p in listed if f"{p['role']}{p['rank']}" == who and p.get("code") is None]
        return alive[0] if who.startswith("server") else os.getpid()

    when_servers_stepped(lambda: killed("applied"))

    def judge(real, fake):
        first.zero_grad()
        yes, no = tell(real), tell(fake)
        (bce(yes, torch.ones_like(yes)) + bce(no, torch.zeros_like(no))).backward()

    for epoch in run.epochs(epochs):
        for real, noise in loader:
            fake = make(noise)
            for _ in range(3 if kind == "critic" else 1):
                judge(real, fake.detach())
                if kind == "one":
                    bce(tell(make(noise)), torch.ones(len(noise), 1).double()).backward()
                first.step()
                if kind == "critic":
                    with torch.no_grad():
                        for p in tell.parameters():
                            p.clamp_(-0.3, 0.3)
            schedule.step()
            killed("between")
            time.sleep(pause_s)
            if kind != "one":
                second.zero_grad()
                wanted = tell(make(noise) if kind == "halves" else fake)
                bce(wanted, torch.ones_like(wanted)).backward()
                killed("backward")
                second.step()
            killed("after")
            time.sleep(2 * pause_s if run.global_step > 3 else 60 * pause_s)  # until it is known that the first batch was given out
    if run.is_main:
        states = [o.state_dict()["state"] for o in ([first] if kind == "one" else [first, second])]
        torch.save([make.state_dict(), tell.state_dict(), *states, schedule.state_dict()["_last_lr"]], "found.pt")
"""

SAMPLES = 100


def served(servers: int = 2, replicas: int = 0) -> tuple[str, ...]:
    return ("--servers", str(servers), "--strategy", f"ps,apply=server,replicas={replicas}")


def found(folder: Path) -> object:
    file = folder / "found.pt"
    value = torch.load(file)
    file.unlink()
    return value


def calm(start_run: Start, folder: Path, kind: str, epochs: int, options: tuple[str, ...]) -> object:
    result = start_run(TRAIN, kind, "0", str(epochs), options=options).wait(END_S)
    assert result.code == 0, result.err
    shutil.rmtree(folder / "runs")
    return found(folder)


def same(a: object, b: object) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


def check(result: Result, folder: Path, right: object, epochs: int, before: set[str]) -> None:
    """The same bits of weights and optimizers' states, every sample once, and nothing left."""
    assert result.code == 0, result.err
    assert same(found(folder), right), result.err
    done = [e for e in result.events if e["event"] == "EpochDone"]
    assert {(e["committed"], e["expected"]) for e in done} == {(SAMPLES, SAMPLES)}
    assert {e["epoch"] for e in done} == set(range(epochs))
    assert f"{SAMPLES * epochs:,} samples" in result.err
    assert leftovers(folder, before) == []


@pytest.mark.timeout(600)
@pytest.mark.case("again: between two steps of one iteration")
@pytest.mark.parametrize(
    ("kind", "servers", "replicas", "plan"),
    [
        ("gan", 2, 0, ["1@3.between", "1@3.between", "0@7.backward", "1@11.after"]),
        ("gan", 2, 1, ["0@4.between", "1@5.backward"]),
        pytest.param("gan", 1, 0, ["1@4.between"], marks=pytest.mark.slow),
        ("critic", 2, 0, ["0@6.between", "1@12.backward"]),
        pytest.param("critic", 1, 0, ["1@6.between"], marks=pytest.mark.slow),
        pytest.param("halves", 2, 1, ["1@2.between", "0@9.between"], marks=pytest.mark.slow),
        ("gan", 2, 1, ["server0@6.between", "1@6.backward"]),
        pytest.param("gan", 2, 1, ["server1@6.between"], marks=pytest.mark.slow),
        ("one", 2, 0, ["1@4.applied", "0@8.applied"]),  # the first of two models is stepped
    ],
)
def test_a_worker_killed_between_two_steps_of_an_iteration(
    start_run, tmp_path, kind, servers, replicas, plan
):
    before, options = segments(), served(servers, replicas)
    right = calm(start_run, tmp_path, kind, 3, options)
    result = start_run(TRAIN, kind, "0.02", "3", *plan, options=options).wait(END_S)
    check(result, tmp_path, right, 3, before)
    assert len(list(tmp_path.glob("killed-*"))) == len(plan)
    workers = [entry for entry in plan if not entry.startswith("server")]
    killed = [
        e for e in result.events if e["event"] == "ProcessEnded" and (e["role"], e["code"]) == ("worker", 137)
    ]
    assert len(killed) == len(workers)
    told = sum(len(e["ranks"]) for e in result.events if e["event"] == "WorkersBack")
    # one who is killed right after it may take its word with it
    assert min(1, len(workers)) <= told <= len(workers)


@pytest.mark.timeout(900)
@pytest.mark.case("again: between two steps of one iteration")
@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("gan", 4),
        *(pytest.param(kind, 8, marks=pytest.mark.slow) for kind in ("gan", "critic", "halves", "one")),
    ],
)
def test_random_kills_of_workers_and_servers(start_run, tmp_path, kind, kills):
    seed = int(os.environ.get("GAN_SEED", str(random.SystemRandom().randrange(10**6))))
    print(f"seed {seed}")
    before, options, epochs = segments(), served(2, 1), 6 * kills
    right = calm(start_run, tmp_path, kind, epochs, options)
    running = start_run(TRAIN, kind, "0.05", str(epochs), options=options)
    at_step(running, 1)
    storm = Storm(running.run_dir.resolve(), seed, ("server", "worker"))
    running.until(storm.whole, WAIT_S)
    for _ in range(kills):
        time.sleep(storm.rng.random())
        storm.kill_and_wait(running)
    result = running.wait(END_S)
    print(storm.killed)
    check(result, tmp_path, right, epochs, before)
