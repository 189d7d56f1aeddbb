"""From a request to stop to its verdict: a table of what was heard meanwhile."""

from __future__ import annotations

import pytest

from echelon.clock import FakeClock
from echelon.events import Beat, CheckpointSaved, Configured
from echelon.launch.blame import Exit
from echelon.launch.preempt import INIT_S, LEAVE_S, Preempting

GRACE_S = 30.0


def saved(step):
    return CheckpointSaved(step=step, path=f"step-{step}", num_bytes=1, copy_s=0.0, write_s=0.0, stall_s=0.0)


def left(*codes):
    return {rank: Exit(rank, code, 0.0, False, 0) for rank, code in enumerate(codes)}


INIT = Configured(strategy={})
ROWS = {
    "not asked": ([INIT], None, {}, 1000.0, None),
    "there is time": ([INIT], [], {}, GRACE_S, None),
    "all left in order": ([INIT], [saved(7)], left(75, 75), 2.0, (75, "step-7")),
    "one came to its own end": ([INIT], [saved(7)], left(0, 75), 2.0, (75, "step-7")),
    "no checkpoint in time": ([INIT, Beat(step=7)], [], {}, GRACE_S + 1, (143, "There is none")),
    "the last one is complete, and nobody leaves": ([INIT, Beat(step=7)], [saved(8)], {}, GRACE_S + LEAVE_S + 1, (75, "step-8")),
    "they may still leave": ([INIT, Beat(step=7)], [saved(8)], {}, GRACE_S + LEAVE_S, None),
    "an older one became complete meanwhile": ([INIT, Beat(step=7)], [saved(4)], {}, GRACE_S + 1, (143, "step-4")),
    "steps after the request do not count": ([INIT, Beat(step=7)], [Beat(step=99), saved(8)], {}, GRACE_S + LEAVE_S + 1, (75, "step-8")),
    "before init": ([], [], {}, INIT_S + 1, (143, "")),
    "still importing": ([], [8.0, Beat(doing="importing")], {}, INIT_S + 1, None),
    "it did import": ([], [8.0, Beat(doing="importing")], {}, 8.0 + INIT_S + 1, (143, "")),
    "one waits in init for the others": ([], [8.0, Beat(waits_group="start")], {}, INIT_S + 1, None),
    "importing for longer than the grace": ([], [29.0, Beat(doing="importing")], {}, GRACE_S + 1, (143, "There is none")),
}  # fmt: skip


@pytest.mark.case("no checkpoint within the grace")
@pytest.mark.parametrize("name", ROWS)
def test_the_table(name):
    before, after, exits, now, expected = ROWS[name]
    clock = FakeClock(0.0)
    preempting = Preempting(GRACE_S, "echelon run --resume", lambda words: None, clock)
    for event in before:
        preempting.hear(event)
    if after is not None:
        preempting.begin("SIGTERM")
        for event in after:
            clock.advance(event) if isinstance(event, float) else preempting.hear(event)
    stop = preempting.verdict(exits, 2, now)
    assert (stop and stop.code) == (expected and expected[0])
    assert stop is None or expected[1] in " ".join(stop.detail)
