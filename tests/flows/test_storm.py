"""kill -9 of servers and workers at random moments of one run, one of a redundancy group at a time: the answer of the undisturbed run."""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import Running, environment, segments, wait_for_nothing
from tests.equality.killing import Killer

SCRIPT = Path(__file__).with_name("stormed.py")


def start(folder: Path, epochs: int, pause_s: float, workers: int, servers: int) -> Running:
    options = ["--servers", str(servers), "--strategy", "ps,apply=server"] if servers else []
    words = [
        sys.executable,
        "-m",
        "echelon",
        "run",
        "--workers",
        str(workers),
        *options,
        "--name",
        folder.name,
    ]
    command = [*words, str(SCRIPT), str(folder), str(epochs), str(pause_s)]
    running = Running(folder, command, environment(folder))
    running.run_dir = folder / "runs" / folder.name
    return running


class Storm(Killer):
    """Also of workers: the next kill waits until the last one's successor made a step."""

    def back(self) -> int:
        return sum(len(e["ranks"]) for e in self.events() if e.get("event") == "WorkersBack")

    def kill_and_wait(self, running: Running) -> tuple[str, float]:
        before, num = self.back(), len(self.killed)
        when = time.monotonic()
        self.kill_one()
        assert len(self.killed) == num + 1
        role, rank = self.killed[-1]
        if role == "worker":
            running.until(lambda: self.back() > before, 90)
        else:
            running.until(
                lambda: {p["rank"] for p in self.processes() if p["role"] == "server"} >= {rank}, 60
            )
            running.until(self.whole, 60)
        return role, when


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.case("ps: 50 random kills of servers and workers in one run")
@pytest.mark.parametrize(("workers", "servers", "kills"), [(3, 2, 50), (2, 3, 10)])
def test_the_weights_are_those_of_the_undisturbed_run(tmp_path, workers, servers, kills):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    before, epochs = segments(), 4 * kills
    (tmp_path / "calm").mkdir()
    (tmp_path / "storm").mkdir()
    assert start(tmp_path / "calm", epochs, 0, 1, 0).wait(600).code == 0
    running = start(tmp_path / "storm", epochs, 0.02, workers, servers)
    storm = Storm(running.run_dir, seed, ("server", "worker"))
    hit: list[tuple[str, float]] = []
    try:
        running.until(lambda: (tmp_path / "storm" / "times-0").exists() and storm.whole(), 90)
        for _ in range(kills):
            time.sleep(storm.rng.random())
            hit.append(storm.kill_and_wait(running))
        result = running.wait(1500)
    finally:
        running.process.kill()
    assert result.code == 0, result.err[-4000:]
    calm, stormy = (torch.load(tmp_path / name / "weights.pt") for name in ("calm", "storm"))
    assert max(float((calm[k] - stormy[k]).abs().max()) for k in calm) < 1e-10
    files = [tmp_path / "storm" / f"times-{rank}" for rank in range(workers)]
    steps = sorted(float(line) for file in files for line in file.read_text().split())
    pauses = sorted(pause(steps, when) for role, when in hit if role == "server")
    waits = sorted(pause(steps, when) for role, when in hit if role == "worker")
    print(f"{len(pauses)} servers: p50 {statistics.median(pauses):.2f} s, max {pauses[-1]:.2f} s")
    print(f"{len(waits)} workers: p50 {statistics.median(waits):.2f} s, max {waits[-1]:.2f} s")
    assert statistics.median(pauses) < 0.5
    assert pauses[-1] < 2.0
    wait_for_nothing(running.run_dir, before, 20)


def pause(steps: list[float], when: float) -> float:
    """The longest time without a step's end from shortly before a kill to a second after it."""
    around = [t for t in steps if when - 0.5 < t < when + 10]
    ends = [t for t in around if t > when]
    first = [t for t in around if t <= when]
    if not ends or not first:
        return 10.0
    later = [t for t in ends if t < when + 2] or ends[:1]
    near = [first[-1], *later]
    return max(b - a for a, b in itertools.pairwise(near))
