"""SIGTERM and kill -9 to real runs: they end in good order, and go on with the bits of a run that was never disturbed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import Running, environment, processes_of

SCRIPT = Path(__file__).with_name("kept.py")
ROLES = [("supervisor", 0), ("worker", 0), ("worker", 1), ("coordinator", 0), ("guard", 0)]
STEP_S = 0.03


class Kept:
    """Starts kept.py, again and again, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, []

    def start(self, *options: str, workers: int = 2, name: str = "kept", pause: float = STEP_S) -> Running:
        out = self.folder / "out"
        out.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "echelon", "run", "--workers", str(workers), "--name", name, *options,
                   str(SCRIPT), str(out), str(pause)]  # fmt: skip
        running = Running(self.folder, command, environment(self.folder))
        running.run_dir = self.folder / "runs" / name
        self.started.append(running)
        return running

    def digests(self, workers: int = 2) -> list[str]:
        return [(self.folder / "out" / f"digest-{rank}").read_text() for rank in range(workers)]

    def forget(self) -> None:
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        shutil.rmtree(self.folder / "runs", ignore_errors=True)


@pytest.fixture
def kept(tmp_path):
    made = Kept(tmp_path)
    yield made
    for running in made.started:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The digests of a run that nobody disturbed."""
    made = Kept(tmp_path_factory.mktemp("calm"))
    assert made.start().wait(90).code == 0
    return made.digests()


def stop_and_resume(kept: Kept, role: str, rank: int, after_s: float, calm: list[str], *options: str) -> str:
    """One SIGTERM to one process `after_s` after its start; what the run said. It must end with 75 (or have been over)."""
    running = kept.start(*options)
    running.until(lambda: running.pid(role, rank), 30)
    time.sleep(after_s)
    pid = running.pid(role, rank)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
    asked = time.monotonic()
    result = running.wait(60)
    assert time.monotonic() - asked < 35
    if result.code == 0:
        assert kept.digests() == calm
        return result.err
    assert result.code == 75, result.err[-3000:]
    assert "stopped in good order" in result.err
    again = kept.start("--resume", *options).wait(90)
    assert again.code == 0, again.err[-3000:]
    assert kept.digests() == calm
    return result.err


@pytest.mark.case("SIGTERM to any process")
@pytest.mark.case("USERS 10")
@pytest.mark.parametrize(
    ("role", "rank"),
    [
        *ROLES[2:3],
        *(pytest.param(*who, marks=pytest.mark.slow) for who in (*ROLES[:2], *ROLES[3:])),
    ],
)
def test_sigterm_to_any_process_ends_with_75_and_the_resumed_run_has_the_same_bits(kept, calm, role, rank):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    stop_and_resume(kept, role, rank, random.Random(seed).uniform(0.0, 3.5), calm)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.case("50 moments of SIGTERM")
def test_sigterm_at_50_random_moments(kept, calm):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(50):
        role, rank = draw.choice(ROLES)
        after_s = draw.uniform(0.0, 5.0)
        options = draw.choice([(), ("--set", "checkpoint_every=2")])
        print(f"{number}: SIGTERM to {role} {rank} after {after_s:.2f} s {options}", flush=True)
        stop_and_resume(kept, role, rank, after_s, calm, *options)
        kept.forget()


@pytest.mark.case("SIGTERM to all processes at once")
def test_sigterm_to_every_process_of_the_job_at_once_loses_nothing(kept, calm):
    """As schedulers of clusters do it: loader processes too."""
    running = kept.start(pause=0.1)
    running.until(lambda: running.shows("samples/s"), 40)
    tree = psutil.Process(running.process.pid).children(recursive=True)
    assert len(tree) >= 6  # guard, coordinator, two workers, two loader processes
    for process in [*tree, psutil.Process(running.process.pid)]:
        process.send_signal(signal.SIGTERM)
    result = running.wait(60)
    assert result.code == 75, result.err[-3000:]
    assert kept.start("--resume").wait(90).code == 0
    assert kept.digests() == calm


@pytest.mark.case("kill -9 and --resume")
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_kill_9_at_random_moments_and_resume_gives_the_same_bits_and_every_sample_once(kept, calm, kills):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    draw, options = random.Random(seed), ("--set", "checkpoint_every=1")
    while kills:  # a run has 18 steps, and each life at least one of them: many kills need several runs
        kept.forget()
        running = kept.start(*options, pause=0.1)
        while kills:
            running.until(lambda r=running: r.shows("checkpoint at step") or r.process.poll() is not None, 60)
            time.sleep(draw.uniform(0.0, 0.5))
            if running.process.poll() is not None:
                break
            os.kill(running.process.pid, signal.SIGKILL)
            running.process.wait()
            kills -= 1
            running.until(lambda: not processes_of(str(kept.folder)), 15)
            running = kept.start("--resume", *options, pause=0.1)
        result = running.wait(90)
        assert result.code == 0, result.err[-3000:]
        assert "goes on from step" in result.err
        assert kept.digests() == calm


@pytest.mark.case("SIGTERM in the last moment")
def test_sigterm_while_a_worker_ends_does_not_change_how_it_ended(kept, calm):
    """The script is over, the interpreter is not: handlers are gone before the process is."""
    for after_s in (0.02, 0.15, 0.3):
        running = kept.start()
        running.until(lambda: (kept.folder / "out" / "digest-0").exists(), 60)
        pid = running.pid("worker", 0)
        time.sleep(after_s)
        if pid is not None and (pid := running.pid("worker", 0)) is not None:
            os.kill(pid, signal.SIGTERM)
        result = running.wait(60)
        assert result.code == 0, result.err[-3000:]
        assert kept.digests() == calm
        kept.forget()


@pytest.mark.case("a second signal ends at once")
def test_a_second_sigterm_ends_everything_at_once(kept):
    running = kept.start(pause=30.0)
    running.until(lambda: running.shows("asked to stop") or (running.pid("worker", 1) and _term(running)), 30)
    time.sleep(1.0)
    began = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    assert running.wait(15).code == 143
    assert time.monotonic() - began < 10


def _term(running: Running) -> bool:
    running.process.send_signal(signal.SIGTERM)
    return True


@pytest.mark.case("no checkpoint within the grace")
def test_without_a_checkpoint_within_the_grace_it_says_so_and_ends_with_143(kept):
    running = kept.start("--grace-s", "2", pause=30.0)
    running.until(lambda: running.pid("worker", 1), 30)
    time.sleep(4.0)
    running.process.send_signal(signal.SIGTERM)
    result = running.wait(20)
    assert result.code == 143
    assert "no checkpoint was complete within 2 s" in result.err
    assert "--grace-s" in result.err


@pytest.mark.case("echelon stop saves")
def test_echelon_stop_saves_and_says_how_to_go_on(kept, calm):
    running = kept.start(pause=0.1)
    running.until(lambda: running.shows("samples/s"), 40)
    command = [sys.executable, "-m", "echelon", "stop", "kept"]
    said = subprocess.run(
        command, cwd=kept.folder, env=environment(kept.folder), capture_output=True, text=True, timeout=60
    )
    assert "with a checkpoint: go on with --resume kept" in said.stdout, said
    assert running.wait(10).code == 75
    assert kept.start("--resume").wait(90).code == 0
    assert kept.digests() == calm


@pytest.mark.case("--resume starts what is not there")
def test_resume_with_a_name_begins_a_run_that_is_not_there_yet(kept, calm):
    result = kept.start("--resume").wait(90)
    assert result.code == 0, result.err[-2000:]
    assert kept.digests() == calm


@pytest.mark.case("checkpoint on one worker only")
def test_a_checkpoint_that_one_worker_alone_asks_for_is_told_to_all(echelon_run):
    result = echelon_run("""
        import torch, echelon
        run = echelon.init()
        model = torch.nn.Linear(1, 1)
        model, opt, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(40, 1), batch_size=4)
        for x in loader:
            model(x).mean().backward()
            opt.step()
            opt.zero_grad()
            if run.is_main and run.global_step == 3:
                run.checkpoint()
    """)
    assert result.code == 1
    assert "run.checkpoint() was called by some workers only: worker 0 1 time, worker 1 0 times" in result.err
    assert "without `if run.is_main`" in result.err


@pytest.mark.case("an iterator left open at the end")
def test_an_iterator_that_is_left_open_does_not_begin_a_checkpoint_while_the_interpreter_ends(echelon_run):
    """It would need a thread, and none can start any more: the process hung for ever."""
    result = echelon_run("""
        import torch, echelon
        run = echelon.init(checkpoint_every=2)
        model = torch.nn.Linear(1, 1)
        model, opt, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(40, 1), batch_size=4)
        batches = iter(loader)
        around = [batches]
        around.append(around)  # cleared away by the collector alone, at the very end
        for _ in range(4):
            model(next(batches)).mean().backward()
            opt.step()
            opt.zero_grad()
    """)
    assert result.code == 0, result.err
    assert [event["step"] for event in result.events if event["event"] == "CheckpointSaved"] == [2]


@pytest.mark.case("SIGTERM in a loop without a loader")
def test_sigterm_in_a_loop_without_a_prepared_loader_stops_it_and_resume_gives_the_same_bits(kept):
    script = kept.folder / "bare.py"
    script.write_text("""
import sys, time
import torch, echelon
run = echelon.init()
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)).double()
model, opt = run.prepare(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))
for i in range(300):
    model(torch.randn(6, 4, dtype=torch.float64)).pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
    time.sleep(float(sys.argv[2]))
    if i == 10:
        run.print("ten steps")
run.save(sys.argv[1])
""")

    def start(name: str, pause: str, *options: str) -> Running:
        command = [sys.executable, "-m", "echelon", "run", "--workers", "2", "--name", name, *options,
                   str(script), str(kept.folder / name), pause]  # fmt: skip
        running = Running(kept.folder, command, environment(kept.folder))
        running.run_dir = kept.folder / "runs" / name
        kept.started.append(running)
        return running

    assert start("calm", "0").wait(60).code == 0
    running = start("cut", "0.05")
    running.until(lambda: running.shows("ten steps"), 60)
    os.kill(running.pid("worker", 1), signal.SIGTERM)
    result = running.wait(40)
    assert result.code == 75, result.err[-2000:]
    again = start("cut", "0", "--resume").wait(60)
    assert again.code == 0, again.err[-2000:]
    assert "of the steps so far were outside any loop" in again.err
    assert (kept.folder / "cut.safetensors").read_bytes() == (kept.folder / "calm.safetensors").read_bytes()
