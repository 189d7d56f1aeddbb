"""Who holds up the run: a table of what ranks last said, and what follows from it."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys

import pytest

from echelon import activity
from echelon.activity import Wait
from echelon.clock import FakeClock
from echelon.control import stacks
from echelon.elastic import coordinator
from echelon.elastic.lookout import Lookout
from echelon.elastic.membership import Change
from echelon.elastic.stuck import decide
from echelon.elastic.views import Options, View
from echelon.events import Beat, Stuck, Unstuck
from echelon.launch.patience import Patience
from echelon.show.stuck import stuck_block

INF = float("inf")


def moving(rank, **known):
    return View(rank=rank, host="vm", pid=100 + rank, **({"step": 7, "begun": {"gradients": 9}} | known))


def waiting(rank, for_s, group="gradients", number=10, what="all_reduce of gradients", num_bytes=64, **known):
    wait = Wait(group, number, what, num_bytes, for_s)
    begun = {"gradients": 9, "values": 4} | {group: number}
    return moving(
        rank, wait=wait, still_s=for_s, site=f"train.py:{30 + rank} in <module>", begun=begun, **known
    )


def standing(rank, still_s, **known):
    return moving(rank, still_s=still_s, **known)


def silent(rank, age_s, process="R", process_age_s=1.0, **known):
    return moving(
        rank, beat_age_s=age_s, still_s=age_s, process=process, process_age_s=process_age_s, **known
    )


B_TO_C, C_TO_B = "10.0.0.2:40000 10.0.0.3:5000", "10.0.0.3:5000 10.0.0.2:40000"

ROWS = {
    # nothing to tell
    "everybody moves": ([moving(0), moving(1)], 0.1, None),
    "one waits for one that moves": ([waiting(0, 60), standing(1, 2)], 0.1, None),
    "not yet": ([waiting(0, 9), standing(1, 9)], 0.1, None),
    "a slow step": ([waiting(0, 20), standing(1, 20)], 8.0, None),
    "a phase of ten minutes": ([standing(0, 600, doing="phase tokenize"), waiting(1, 600, "phase", 1, "phase tokenize")], 0.1, None),
    "a phase that holds the GIL and computes": (
        [silent(0, 600, doing="phase tokenize", cpu_share=1.0), waiting(1, 600, "phase", 1, "phase tokenize")], 0.1, None),
    "nobody waits for the one that sleeps": ([standing(0, 500), standing(1, 500)], 0.1, None),
    "a large save": ([standing(0, 200, doing="run.save"), waiting(1, 200, "values", 5)], 0.1, None),
    "compiling": ([standing(0, 200, doing="compiling", step=0), waiting(1, 200, step=0)], 0.0, None),
    "loading before the first step": ([standing(0, 50, step=0, cpu_share=1.0), waiting(1, 50, step=0)], 0.0, None),
    "silent, and the others go on": ([moving(0), silent(1, 60)], 0.1, None),
    "alone and computing": ([standing(0, 500, cpu_share=1.0)], 0.1, None),
    "a long all-reduce that all are in": ([waiting(0, 25), waiting(1, 25)], 1.0, None),
    "the others left and one goes on": ([standing(0, 500), moving(1, state="left")], 0.1, None),
    "silent, but not long enough, after it stood still": ([waiting(0, 7), standing(1, 11, beat_age_s=7, cpu_share=1.0)], 0.1, None),
    # one that stands still
    "asleep": ([waiting(0, 10), standing(1, 10, cpu_share=0.01)], 0.1, ("asleep", (1,))),
    "busy": ([waiting(0, 10), standing(1, 10, cpu_share=0.9)], 0.1, ("busy", (1,))),
    "data": ([waiting(0, 10), standing(1, 10, doing="data")], 0.1, ("data", (1,))),
    "busy before the first step": ([waiting(0, 61, step=0), standing(1, 61, step=0, cpu_share=1.0)], 0.0, ("busy", (1,))),
    "asleep before the first step": ([waiting(0, 10, step=0), standing(1, 10, step=0)], 0.0, ("asleep", (1,))),
    "three median steps": ([waiting(0, 24), standing(1, 24)], 8.0, ("asleep", (1,))),
    "two at once": ([waiting(0, 12), standing(1, 11), standing(2, 12)], 0.1, ("asleep", (1, 2))),
    "a save that never ends": ([standing(0, 301, doing="run.save"), waiting(1, 301, "values", 5)], 0.1, ("asleep", (0,))),
    "late to init": ([waiting(0, 50, "start", 0, "others", step=0), standing(1, 50, step=0)], 0.0, None),
    "never came to init": ([waiting(0, 61, "start", 0, "others", step=0), standing(1, 61, step=0)], 0.0, ("asleep", (1,))),
    # one that cannot speak
    "stopped": ([waiting(0, 9.5), silent(1, 10, "T")], 0.1, ("stopped", (1,))),
    "stopped in a phase": ([silent(0, 10, "T", doing="phase x"), waiting(1, 60, "phase", 1)], 0.1, ("stopped", (0,))),
    "dead in a phase": ([silent(0, 10, "S", doing="phase x", cpu_share=0.0), waiting(1, 60, "phase", 1)], 0.1, ("silent", (0,))),
    "holds the GIL": ([waiting(0, 9.5), silent(1, 10, cpu_share=1.0)], 0.1, ("silent", (1,))),
    "holds the GIL in an operation it had begun": (
        [waiting(0, 9.5), silent(1, 10, begun={"gradients": 10})], 0.1, ("silent", (1,))),
    "its host is silent too": ([waiting(0, 11), silent(1, 12, process_age_s=12)], 0.1, ("unreachable", (1,))),
    "its host spoke a second longer": ([waiting(0, 9), silent(1, 10, process_age_s=8.7)], 0.1, ("unreachable", (1,))),
    "a whole host is silent": (
        [waiting(0, 11), silent(1, 12, process_age_s=12), silent(2, 12, process_age_s=11)], 0.1, ("unreachable", (1, 2))),
    "holds the GIL behind a phase": (
        [silent(0, 10, doing="phase x", cpu_share=1.0), waiting(1, 9)], 0.1, ("silent", (0,))),
    "nobody ever looked at its process": ([waiting(0, 9.5), silent(1, 10, "", None)], 0.1, ("silent", (1,))),
    "alone and stopped": ([silent(0, 10, "T")], 0.1, ("stopped", (0,))),
    "alone and holding the GIL": ([silent(0, 10, cpu_share=1.0)], 0.1, ("silent", (0,))),
    "alone, loading with the GIL": ([silent(0, 50, cpu_share=1.0, step=0)], 0.0, None),
    "all hold the GIL": ([silent(0, 10, cpu_share=1.0), silent(1, 10, cpu_share=1.0)], 0.1, ("silent", (0, 1))),
    # different collectives
    "different groups": ([waiting(0, 5), waiting(1, 5, "values", 5)], 0.1, ("mismatch", (0, 1))),
    "not yet different": ([waiting(0, 4), waiting(1, 6, "values", 5)], 0.1, None),
    "one group, another size": ([waiting(0, 5), waiting(1, 5, num_bytes=128)], 0.1, ("mismatch", (0, 1))),
    "a collective in a phase": ([waiting(0, 6, "values", 5), waiting(1, 6, "phase", 1)], 0.1, ("mismatch", (0, 1))),
    "torch's own barrier": ([waiting(0, 6), waiting(1, 6, "torch.distributed", 0)], 0.1, ("mismatch", (0, 1))),
    "two of three": ([waiting(0, 6), waiting(1, 6), waiting(2, 6, "values", 5)], 0.1, ("mismatch", (0, 2))),
    "waits for one that sleeps, not for each other": (
        [waiting(0, 12), waiting(1, 12), standing(2, 12)], 0.1, ("asleep", (2,))),
    # not there
    "left": ([waiting(0, 5), moving(1, state="left")], 0.1, ("absent", (1,))),
    "ended, with a thread that goes on": ([waiting(0, 5), standing(1, 6, doing="script ended")], 0.1, ("absent", (1,))),
    # nobody's fault
    "a dead link": ([waiting(0, 30), waiting(1, 30)], 0.1, ("link", ())),
    "a dead link, and one got past it": (
        [waiting(0, 30, number=11), waiting(1, 30), waiting(2, 30)], 0.1, ("link", ())),
    "all wait for data": ([standing(0, 31, doing="data")], 0.1, ("data", (0,))),
    # a connection without an answer
    "a dead connection": ([waiting(0, 10), waiting(1, 10, links={B_TO_C: 7.0}), waiting(2, 10, links={C_TO_B: 0.0})],
                          0.1, ("link", (1, 2))),
    "a dead connection seen from the other end": (
        [waiting(0, 10), waiting(1, 10, links={B_TO_C: 0.0}), waiting(2, 10, links={C_TO_B: 7.0})], 0.1, ("link", (1, 2))),
    "a dead connection, and one got past it": (
        [waiting(0, 10, number=11), waiting(1, 10, links={B_TO_C: 7.0}), waiting(2, 10, links={C_TO_B: 0.0})],
        0.1, ("link", (1, 2))),
    "a dead connection before the first step": (
        [waiting(0, 10, step=0), waiting(1, 10, step=0, links={B_TO_C: 7.0}), waiting(2, 10, step=0, links={C_TO_B: 7.0})],
        0.0, ("link", (1, 2))),
    "a dead connection in torch's own collective": (
        [waiting(0, 10, "torch.distributed", 0, links={B_TO_C: 7.0}), waiting(1, 10, "torch.distributed", 0, links={C_TO_B: 0.0})],
        0.1, ("link", (0, 1))),
    "a dead connection in a slow step": ([waiting(0, 20, links={B_TO_C: 15.0}), waiting(1, 20, links={C_TO_B: 0.0})], 8.0, None),
    "a connection that paused": ([waiting(0, 12, links={B_TO_C: 2.0}), waiting(1, 12, links={C_TO_B: 0.0})], 0.1, None),
    "a dead connection to somebody else": (
        [waiting(0, 12, links={"10.0.0.2:7 10.9.9.9:5432": 60.0}), waiting(1, 12, links={C_TO_B: 0.0})], 0.1, None),
    "a dead connection, and one still computes": (
        [waiting(0, 12, links={B_TO_C: 7.0}), waiting(1, 12, links={C_TO_B: 0.0}), standing(2, 2)], 0.1, None),
    "its other end did not fit into the beat": (
        [waiting(0, 10, links={B_TO_C: 7.0}), waiting(1, 10, links={"10.0.0.3:1 10.0.0.1:2": 0.0})], 0.1, ("link", (0, 1))),
    "its other end may be either of two": (
        [waiting(0, 10, links={B_TO_C: 7.0}), waiting(1, 10, links={"10.0.0.3:1 10.0.0.1:2": 0.0}),
         waiting(2, 10, links={"10.0.0.3:3 10.0.0.1:2": 0.0})], 0.1, None),
}  # fmt: skip


@pytest.mark.case("stuck: the decision")
@pytest.mark.case("stuck: a dead link")
@pytest.mark.parametrize("name", ROWS)
def test_the_table(name):
    views, median_step_s, expected = ROWS[name]
    found = decide(views, median_step_s)
    assert (found and (found.kind, found.ranks)) == expected
    assert found is None or found.reason


def test_only_data_that_nobody_waits_for_is_a_mere_notice():
    for name, (views, median, _) in ROWS.items():
        found = decide(views, median)
        assert found is None or found.stops == (name != "all wait for data")


def test_both_call_sites_are_told():
    views, median, _ = ROWS["different groups"]
    found = decide(views, median)
    assert [
        ("train.py:30 in <module>" in line, "train.py:31 in <module>" in line) for line in found.others
    ] == [
        (True, False),
        (False, True),
    ]


def seats(num, state="joined"):
    return {rank: Change(1, rank, state, "", "vm", 100 + rank) for rank in range(num)}


class Story:
    """A lookout that is told beats once a second."""

    def __init__(self):
        self.clock = FakeClock(100.0)
        self.lookout = Lookout(Options(), self.clock)
        self.told = []

    def second(self, *beats, process="S"):
        self.clock.advance(1.0)
        for beat in beats:
            self.lookout.beat(beat)
        self.lookout.seen({"0": [process, 1.0], "1": [process, 1.0]}, {})
        self.told += self.lookout.look(seats(2), 2)


def beat(rank, second, step, **known):
    return Beat(rank=rank, step=step, progress=step, total_s=float(second), stack=["train.py:9 f"], **known)


def blocked(rank, second, step, for_s):
    return beat(rank, second, step, waits_in="all_reduce of gradients", waits_group="gradients", waits_number=step + 1,
                waits_s=for_s, begun={"gradients": step + 1})  # fmt: skip


def test_one_incident_is_told_once_and_its_end_too():
    story = Story()
    for i in range(1, 6):
        story.second(beat(0, i, i, begun={"gradients": i}), beat(1, i, i, begun={"gradients": i}))
    for i in range(6, 30):
        story.second(blocked(0, i, 5, i - 5), beat(1, i, 5, begun={"gradients": 5}))
    assert [type(event) for event in story.told] == [Stuck]
    assert (story.told[0].rank, story.told[0].kind, story.told[0].step) == (1, "asleep", 5)
    assert 10.0 <= story.told[0].age_s <= 12.0
    story.second(beat(0, 31, 6), beat(1, 31, 6))
    assert isinstance(story.told[1], Unstuck)


def test_the_median_step_sets_the_patience():
    story = Story()
    for step in range(1, 6):
        for i in range(8):
            now = step * 8 + i
            story.second(
                beat(0, now, step, begun={"gradients": step}), beat(1, now, step, begun={"gradients": step})
            )
    assert story.lookout.median_step_s() == pytest.approx(8.0)
    for i in range(60):
        story.second(blocked(0, 48 + i, 5, i), beat(1, 48 + i, 5, begun={"gradients": 5}))
    assert 24.0 <= story.told[0].age_s <= 27.0


def test_a_coordinator_that_stood_still_blames_nobody():
    story = Story()
    for i in range(1, 6):
        story.second(blocked(0, i, 5, i), beat(1, i, 5))
    story.clock.advance(500.0)
    story.second()
    assert story.told == []


def test_what_came_over_the_wire_wrong_is_left_aside():
    lookout = Lookout()
    for rank in range(4):
        lookout.beat(Beat(rank=rank))
    lookout.seen(
        {"x": ["R", 1.0], "-1": ["R", 1], "0": "R", "1": ["R"], "2": ["R", "x"], "3": ["R", float("nan")], "\u00b2": ["R", 1.0],
         "7": ["R", 1.0], "9" * 5000: ["R", 1.0]},
        {"0": "no", "y": [], "\u00b2": ["f"], "7": ["f"], "9" * 5000: ["f"]},
    )  # fmt: skip
    assert lookout.processes == {}
    assert lookout.stacks == {}


def event(**known):
    return Stuck(**({"rank": 1, "kind": "asleep", "reason": "it sleeps since 11 s and does not come", "ranks": [1],
                     "host": "vm", "pid": 42, "step": 7, "stack": ["/x/train.py:9 f"], "others": ["worker 0 " * 12]}
                    | known))  # fmt: skip


def test_patience_ends_the_run_after_stuck_s():
    patience = Patience({"stuck_s": 5.0}, lambda rank: f"logs/worker-{rank}.log", lambda: False)
    assert patience.stop(0.0) is None
    patience.hear(event(), 100.0)
    assert patience.stop(104.9) is None
    stop = patience.stop(105.0)
    assert stop.code == 124
    assert stop.block[-1] == "The run was stopped 5 s after the alarm (exit code 124)."


def test_patience_is_ten_times_longer_before_the_first_step_unless_it_is_sure():
    for known, until in (({"step": 0}, 300.0), ({"step": 0, "sure": True}, 30.0), ({}, 30.0)):
        patience = Patience({}, str, lambda: False)
        patience.hear(event(**known), 0.0)
        assert (patience.stop(until - 1), patience.stop(until).code) == (None, 124)


def test_patience_is_called_off_and_may_be_endless():
    patience = Patience({}, str, lambda: False)
    patience.hear(event(), 0.0)
    assert patience.hear(Unstuck(rank=1, kind="asleep", after_s=3.0), 3.0) == [
        "worker 1 goes on, 3 s after the alarm"
    ]
    assert patience.stop(INF) is None
    for endless in (Patience({"stuck": "wait"}, str, lambda: False), Patience({}, str, lambda: False)):
        endless.hear(event(stops=False), 0.0)
        assert endless.stop(INF) is None


def test_the_block_fits_80_columns():
    long = "/very/long/path" * 12
    shown = event(
        stack=[f"{long}/train.py:9 f"] * 20,
        reason=f"reason at {long} " * 3,
        others=["worker 0 waits " * 20] * 9,
    )
    lines = stuck_block(shown, log=f"{long}/worker-1.log", then="then " * 30, style=False, cwd="/x")
    assert [line for line in lines if len(line) > 80 and long not in line] == []
    assert lines[1] == "stuck (asleep): worker 1 on vm (pid 42) holds up the run at step 7"
    assert "    … and 3 more" in lines


def test_waits_nest_and_are_seen_with_their_site():
    def script():
        with activity.inside("run.save"), activity.waiting("values", 3, "all_gather", 8):
            with activity.waiting("start", 0, "others"):
                assert activity.now().wait.group == "start"
            return activity.now()

    before = activity.now().progress
    now = script()
    assert (now.wait.group, now.wait.number, now.wait.what, now.doing) == (
        "values",
        3,
        "all_gather in run.save",
        "run.save",
    )
    assert now.site.startswith(f"{__file__}:")
    after = activity.now()
    assert (after.wait, after.doing, after.progress) == (None, "", before + 2)


def test_a_dump_of_faulthandler_is_read_innermost_last():
    text = 'Current thread 0x01 (most recent call first):\n  File "/a b/x.py", line 3 in f\n  File "y.py", line 4 in <module>\n'
    assert stacks.read(text) == ["y.py:4 <module>", "/a b/x.py:3 f"]


@pytest.mark.parametrize(
    ("files", "doing"),
    [
        (["/x/train.py"], ""),
        (
            ["/v/site-packages/torch/_dynamo/utils.py", "<frozen importlib._bootstrap>", "/x/train.py"],
            "importing",
        ),
        (["/x/model.py", "<frozen importlib._bootstrap>", "/x/train.py"], ""),
        (["/v/site-packages/torch/_inductor/compile_fx.py", "/x/train.py"], "compiling"),
        (["/x/block.py", "/v/site-packages/torch/_dynamo/eval_frame.py", "/x/train.py"], ""),
        (["/x/data.py", "/v/site-packages/torch/utils/data/dataloader.py", "/x/train.py"], "data"),
        (["/v/site-packages/torch/autograd/graph.py", "/x/train.py"], "backward"),
    ],
)
def test_what_a_thread_does_is_recognised_by_its_frames(files, doing):
    assert activity.recognised(files) == doing


def test_a_look_that_fails_costs_one_look(capsys):
    looks = []

    async def look():
        looks.append(1)
        if len(looks) == 1:
            raise KeyError("a bug of ours")
        raise asyncio.CancelledError

    async def main():
        with contextlib.suppress(asyncio.CancelledError):
            await coordinator._again(look)

    asyncio.run(main())
    assert len(looks) == 2
    assert "a bug of ours" in capsys.readouterr().err


@pytest.mark.case("a look never kills")
def test_looking_at_a_main_thread_that_runs_on_does_not_crash(tmp_path):
    """Walking along f_back from another thread did, in seconds, with CPython 3.11.7: a beat once killed its worker."""
    script = tmp_path / "looked_at.py"
    script.write_text("""
import gc, sys, threading, time
import torch
from echelon.control.beat import complete
from echelon.events import Beat
sys.setswitchinterval(1e-5)
end = time.monotonic() + 4.0
def look():
    for n in range(10**9):
        beat = complete(Beat(), 0)
        if n % 50 == 0:
            gc.collect()
        if time.monotonic() > end:
            print(beat.stack[0])
            return
thread = threading.Thread(target=look)
thread.start()
layer = torch.nn.Linear(4, 4)
while thread.is_alive():
    for _ in (x for x in range(3)):
        layer(torch.ones(2, 4)).sum().backward()
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(f"{script}:"), done.stdout
