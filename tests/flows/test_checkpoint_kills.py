"""Real writers killed with SIGKILL at random moments: the last complete checkpoint always loads, and is right."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.checkpoint.load import latest
from tests.flows.checkpoint_writer import check
from tests.flows.live_coordinator import ROOT, coordinator


class Nursery:
    """A process that has imported torch and forks writers."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("checkpoint_writer.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self.living: set[int] = set()
        assert self._line() == "ready"

    def fork(self, *words: object, token: str = "") -> int:
        self._say(*words)
        if token:
            self._say(token)
        pid = int(self._line())
        self.living.add(pid)
        return pid

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self._say("reap", pid)
        assert self._line() == "reaped"
        self.living.discard(pid)

    def close(self) -> None:
        for pid in list(self.living):
            self.kill(pid)
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()  # type: ignore[union-attr]

    def _say(self, *words: object) -> None:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


def kill_many(nursery: Nursery, target: Path, kills: int, capsys: pytest.CaptureFixture[str]) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    dice = random.Random(seed)
    incomplete = saves = 0
    horizon_s = 0.25
    first = 1
    for number in range(kills):
        where = f"seed {seed}, kill {number}"
        pid = nursery.fork("solo", target, first)
        time.sleep(dice.uniform(0.0, horizon_s))
        nursery.kill(pid)
        acks = Path(f"{target}.acks")
        known = [int(line) for line in acks.read_text().split()] if acks.exists() else []
        horizon_s = min(2.0, 1.3 * horizon_s) if len(known) == saves else max(0.25, 0.8 * horizon_s)
        saves = len(known)
        saved, skipped = latest(target)
        incomplete += bool(skipped)
        if saved is None:
            assert not known, f"{where}: step {max(known)} was complete and is gone"
            continue
        assert saved.step >= max(known, default=0), where
        check(saved)
        first = saved.step + 1
    with capsys.disabled():
        print(
            f"\n  {kills} kills with seed {seed}: {saves} checkpoints complete, {incomplete} times a newer one was not"
        )
    assert saves > kills / 10, "most were killed before their first checkpoint: this shows nothing"


@pytest.mark.case("kill -9 around checkpoints")
def test_killed_at_any_moment_the_last_complete_one_loads(nursery, tmp_path, capsys):
    kill_many(nursery, tmp_path / "target", 40, capsys)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.case("kill -9 at 200 moments around checkpoints")
def test_killed_at_200_moments_the_last_complete_one_loads(nursery, tmp_path, capsys):
    kill_many(nursery, tmp_path / "target", 200, capsys)


@pytest.mark.parametrize("victim", [0, 2])
def test_one_rank_killed_ends_the_checkpoint_of_the_others_within_seconds(nursery, tmp_path, victim):
    """Three processes that agree through a real coordinator."""
    target = tmp_path / "target"
    with coordinator(tmp_path, num_workers=3) as live:
        pids = [nursery.fork("rank", rank, 3, target, live.address, token=live.token) for rank in range(3)]
        words = {rank: Path(f"{target}.rank-{rank}") for rank in range(3)}
        until(lambda: words[victim].exists() and words[victim].read_text().startswith("saved"))
        nursery.kill(pids[victim])
        began = time.monotonic()
        supervisor = live.client(0, "supervisor")
        supervisor.call("died", _soon(), rank=victim, code=137)
        supervisor.close()
        others = [rank for rank in range(3) if rank != victim]
        until(lambda: all(words[rank].read_text().startswith("failed") for rank in others))
        assert time.monotonic() - began < 10
        assert all(f"rank {victim} on here" in words[rank].read_text() for rank in others), words[
            others[0]
        ].read_text()
        saved, _ = latest(target)
        check(saved)


def test_the_coordinator_may_restart_in_the_middle(nursery, tmp_path):
    target = tmp_path / "target"
    with coordinator(tmp_path, num_workers=2) as live:
        for rank in range(2):
            nursery.fork("rank", rank, 2, target, live.address, token=live.token)
        words = [Path(f"{target}.rank-{rank}") for rank in range(2)]
        until(lambda: all(word.exists() and _step(word) > 0 for word in words))
        for _ in range(3):
            live.kill()
            step = _step(words[0])
            live.start()
            until(lambda step=step: _step(words[0]) > step + 2)
        assert not any(word.read_text().startswith("failed") for word in words)
        saved, _ = latest(target)
        assert saved.step >= step


def _step(path: Path) -> int:
    text = path.read_text()
    assert not text.startswith("failed"), text
    return int(text.split()[1]) if text.startswith("saved") else 0


def _soon():
    from echelon.clock import Deadline

    return Deadline.after(20)


def until(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)
