"""A disk that is full for real, a folder that cannot be written, and how much memory a checkpoint takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from echelon.checkpoint.holding import Holding
from echelon.checkpoint.load import latest
from echelon.checkpoint.meeting import alone
from echelon.checkpoint.saver import Saver
from echelon.clock import Deadline
from echelon.events import CheckpointFailed, CheckpointSaved
from echelon.mesh.layout import Key, Span
from echelon.show.progress import failed_text
from tests.checkpoint_ranks import read, save, whole
from tests.flows.live_coordinator import ROOT

MIB = 1 << 20


@pytest.mark.case("a full disk keeps the old checkpoint")
@pytest.mark.needs("disk")
def test_a_full_disk_keeps_the_old_one_and_says_so(small_disk):
    events: list = []
    saver = Saver(small_disk / "checkpoints", 0, 1, alone(), events.append)
    first = saver.save(10, whole({"w": torch.ones(MIB)}, 1), None, {})
    saver.finish(Deadline.after(60))
    assert first.state == "complete"
    for step in (20, 30):  # 4 MiB are taken, and 16 more do not fit
        handle = saver.save(step, whole({"w": torch.zeros(4 * MIB)}, 1), None, {})
        saver.finish(Deadline.after(60))
        assert handle.state == "failed"
        assert "the disk is full (" in handle.error
        assert "of 12 MiB are free)" in handle.error
    assert [type(event) for event in events] == [CheckpointSaved, CheckpointFailed, CheckpointFailed]
    kept = f"{small_disk}/checkpoints/step-00000010"
    assert failed_text(events[-1]).endswith(f"The last complete one is kept: {kept}")
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step-00000010"], (
        "nothing partial is left"
    )
    saved, skipped = latest(small_disk / "checkpoints")
    assert (saved.step, skipped) == (10, [])
    assert read(saved, "w").sum() == MIB
    again = saver.save(40, whole({"w": torch.zeros(MIB)}, 1), None, {})
    saver.finish(Deadline.after(60))
    assert again.state == "complete", "what fits is saved again"


@pytest.mark.case("a full disk keeps the old checkpoint")
@pytest.mark.needs("disk")
def test_the_disk_of_one_of_three_ranks_is_full(small_disk, tmp_path):
    """Rank 2 writes more than fits; all three hear of it. (Their folders are one: only its share is too large.)"""
    sizes = [1000, 1000, 4 * MIB]

    def held(rank):
        tensor = torch.ones(sizes[rank])
        return [Holding(Key(f"w{rank}"), tensor, Span.whole(tuple(tensor.shape)), (rank,))]

    handles = save(small_disk, 1, held, size=3)
    assert {handle.state for handle in handles} == {"failed"}
    assert {handle.error for handle in handles} == {handles[0].error}
    assert handles[0].error.startswith("rank 2 on ")
    assert list(small_disk.iterdir()) == []


PROGRAM = """
import json, sys, threading, torch
from tests.checkpoint_ranks import whole, together
from echelon.checkpoint.meeting import Room
from echelon.checkpoint.saver import Saver
from echelon.clock import Deadline

target, size = sys.argv[1], int(sys.argv[2])
def rss(field):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(field))
state = {f"layer.{i}": torch.randn(5_000_000) for i in range(20)}      # 400 MB
room = Room(size)
savers = [Saver(target, rank, size, room.meeting(rank), lambda event: None) for rank in range(size)]
def act(rank):
    for step in range(3):
        handle = savers[rank].save(step, whole(state, size), {"step": step}, {})
        savers[rank].before_change()
        handle.wait(Deadline.after(120))
open("/proc/self/clear_refs", "w").write("5")                          # the peak starts anew
before = rss("VmRSS")
together(size, act)
print(json.dumps({"before": before, "peak": rss("VmHWM"), "state": sum(t.nbytes for t in state.values())}))
"""


@pytest.mark.case("checkpoint memory: a share + 10 %")
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_checkpoint_takes_no_more_memory_than_its_share_and_a_tenth(tmp_path, size, capsys):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "t"), str(size)],
        capture_output=True, text=True, timeout=170, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    grown = (found["peak"] - found["before"]) / found["state"]
    with capsys.disabled():
        print(
            f"\n  {size} rank(s): {found['state'] / 1e6:.0f} MB of state, {grown:.3f} of it more memory at the peak"
        )
    assert grown < 1.10
