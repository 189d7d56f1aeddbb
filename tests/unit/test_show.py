"""Progress, summary and the failure block: events in, words out."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import pytest

from echelon.clock import FakeClock
from echelon.events import (
    Beat,
    CheckpointFailed,
    CheckpointSaved,
    EpochDone,
    Facts,
    Failed,
    Left,
    Logged,
    Metric,
    PhaseChanged,
    ProcessEnded,
    ProcessStarted,
    Serving,
    StepLost,
    UpdateSkipped,
    Warned,
)
from echelon.launch.blame import Exit, judge
from echelon.show.ended import failure_block
from echelon.show.progress import Display, bar, live_lines, plain_line, starting_line
from echelon.show.state import Progress, duration, number
from echelon.show.summary import closing, measured, summary


def beat(rank: int, step: int, samples: int, seconds: float) -> Beat:
    return Beat(rank=rank, step=step, epoch=1, samples=samples, data_s=0.1 * seconds, forward_s=0.3 * seconds,
                backward_s=0.4 * seconds, wait_s=0.1 * seconds, total_s=seconds)  # fmt: skip


def trained() -> Progress:
    progress = Progress(num_workers=2)
    for second in range(4):
        for rank in (0, 1):
            progress.take(beat(rank, 10 * second, 100 * second, float(second)), 50.0 + second)
    progress.take(Metric(step=31, values={"accuracy": 0.5, "loss": 0.123456}), 54.0)
    return progress


@pytest.mark.case("plain lines")
def test_a_plain_line_says_it_all():
    assert plain_line(trained()) == (
        "step 31 · epoch 1 · 200 samples/s · loss 0.1235 · accuracy 0.5 · "
        "data 10% forward 30% backward 40% waiting 10%"
    )


@pytest.mark.case("live progress line")
def test_the_live_lines_are_cut_at_the_width_of_the_terminal():
    from rich.console import Console

    progress = trained()
    progress.take(Metric(step=31, values={f"metric_{i}": 1.0 for i in range(20)}), 55.0)
    for width in (20, 80):
        console = Console(file=io.StringIO(), width=width)
        console.print(live_lines(progress))
        lines = console.file.getvalue().splitlines()
        assert len(lines) == 2
        assert all(len(line) <= width for line in lines)


def test_a_bar_never_exceeds_its_columns():
    assert bar([0.5, 0.25, 0.25], 16, ["a", "b", "c"]) == [("a", 8), ("b", 4), ("c", 4), ("", 0)]
    assert sum(columns for _, columns in bar([0.33, 0.33, 0.33], 10, ["a", "b", "c"])) == 10


def test_one_workers_log_is_already_the_average():
    alone, two = Progress(1), Progress(2)
    for progress in (alone, two):
        progress.take(Logged(step=1, values={"loss": 1.0}, weight=1.0), 0.0)
    assert (alone.metrics, two.metrics) == ({"loss": 1.0}, {})


def test_without_a_terminal_a_line_at_the_first_step_and_then_every_ten_seconds():
    clock, out, err = FakeClock(100.0), io.StringIO(), io.StringIO()
    display = Display(num_workers=1, out=out, err=err, clock=clock)
    for step in range(1, 26):
        display.handle(beat(0, step, step * 8, float(step)))
        clock.advance(1.0)
    assert [line.split(" ·")[0] for line in err.getvalue().splitlines()] == ["step 1", "step 11", "step 21"]
    assert out.getvalue() == ""


def test_facts_and_warnings_are_told_once():
    err, out = io.StringIO(), io.StringIO()
    display = Display(num_workers=2, out=out, err=err)
    for rank in (0, 1):
        display.handle(Facts(rank=rank, lines=["global batch 64", "same answer"]))
        display.handle(Warned(rank=rank, message="the mean is biased by 1.2\nuse run.mean"))
    display.handle(StepLost(rank=0, step=3, batches=1, reason="worker 1 is gone"))
    display.handle(EpochDone(rank=0, epoch=0, committed=99, expected=100))
    assert err.getvalue().splitlines() == [
        "global batch 64", "same answer", "warning (worker 0): the mean is biased by 1.2", "  use run.mean",
        "step 3 did not meet (worker 1 is gone): nothing was applied, 1 batch run again",
        "warning (worker 0): epoch 0 committed 99 of 100 samples",
    ]  # fmt: skip
    assert out.getvalue() == ""


def test_checkpoints_have_a_line_each_and_a_failed_one_says_what_is_kept():
    err = io.StringIO()
    display = Display(num_workers=2, err=err, clock=FakeClock(100.0))
    saved = {"rank": 0, "num_bytes": 12_340_000, "copy_s": 0.1, "write_s": 0.4, "stall_s": 0.004}
    for step in (20, 40):
        display.handle(CheckpointSaved(step=step, path=f"c/step-{step}", **saved))
    full = "rank 1 on b: the disk is full\n  Free some space."
    display.handle(CheckpointFailed(rank=0, step=60, path="c/step-60", reason=full, kept="c/step-40"))
    display.handle(CheckpointFailed(rank=0, step=80, path="c/step-80", reason="no", kept=""))
    assert err.getvalue().splitlines() == [
        "checkpoint at step 20: 12.3 MB in 0.5 s, training waited 4 ms (c/step-20)",
        "checkpoint at step 40: 12.3 MB in 0.5 s, training waited 4 ms (c/step-40)",
        "warning: the checkpoint at step 60 failed: rank 1 on b: the disk is full",
        "  Free some space.", "  The last complete one is kept: c/step-40",
        "warning: the checkpoint at step 80 failed: no", "  There is no older one.",
    ]  # fmt: skip


def test_a_phase_is_shown_while_it_lasts():
    progress = trained()
    progress.take(PhaseChanged(rank=0, name="tokenize", state="at", share=0.47), 60.0)
    assert "phase tokenize 47%" in plain_line(progress)
    progress.take(PhaseChanged(rank=0, name="tokenize", state="over"), 61.0)
    assert "tokenize" not in plain_line(progress)


@pytest.mark.case("summary")
def test_a_summary_fits_80_columns():
    progress = trained()
    progress.take(Left(rank=0, step=31), 60.0)
    lines = summary(
        progress, name="train-20261115-ab12", run_dir=Path("/x/runs/r"), wall_s=75.2, memory={0: 3 << 30}
    )
    assert lines[0] == "run train-20261115-ab12 finished in 1 min 15 s"
    assert lines[1] == "  31 steps, 600 samples, 200 samples/s"
    assert any(line.split() == ["0", "31", "300", "10%", "30%", "40%", "10%", "3.0", "GiB"] for line in lines)
    assert all(len(line) <= 80 for line in lines)
    assert lines[-2:] == ["  folder /x/runs/r", "  logs: echelon logs /x/runs/r --rank 0"]


@pytest.mark.case("ps: what servers did is seen")
def test_a_summary_says_what_servers_did_a_second_and_how_far_behind_gradients_were():
    progress = trained()
    behind = {"0": 60, "1": 700, "2": 200, "4": 30, "8": 5, "16": 2, "32": 2, "64": 1}
    told = {"updates": 1000, "bytes_in": 40_000_000, "bytes_out": 20_000_000, "busy_s": 20.0}
    progress.take(Serving(rank=0, stale=[1, 5, 70], behind=behind, **told), 60.0)
    progress.take(Serving(rank=1, sums=40, bytes_in=2_000_000, bytes_out=2_000_000), 60.0)
    lines = summary(
        progress, name="r", run_dir=Path("/x"), wall_s=75.2, memory={}, servers={0: 1 << 28, 1: 1 << 28}
    )
    assert "  server 0: 256 MiB, 1,000 updates (50/s), 40.0 MB in, 20.0 MB out (3.0 MB/s)" in lines
    assert any("server 1: 256 MiB, 40 sums, 2.0 MB in, 2.0 MB out" in line for line in lines)
    assert "  gradients were behind by 1 update (median), 5 (99 %), 70 at most" in lines
    found = " ".join(" ".join(lines).split())
    assert "updates behind 0: 6 % · 1: 70 % · 2-3: 20 % · 4-7: 3 % · 8-15: < 1 %" in found
    assert "64-127: < 1 %" in found
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.case("nonfinite: seen")
def test_skipped_updates_are_counted_over_all_workers_that_told_of_them():
    progress = trained()
    for rank, total in ((0, 1), (0, 2), (1, 1)):
        progress.take(UpdateSkipped(rank=rank, step=3, reason="r", total=total), 60.0)
    lines = summary(progress, name="r", run_dir=Path("/x"), wall_s=75.2, memory={})
    assert "  3 updates skipped: their gradients were not finite" in lines


def test_a_summary_says_what_compress_saved():
    progress = trained()
    beat = progress.beats[0]
    progress.beats[0] = dataclasses.replace(beat, sent_bytes=31 * 991_000, plain_bytes=31 * 3_933_000)
    lines = summary(progress, name="r", run_dir=Path("/x/runs/r"), wall_s=75.2, memory={})
    assert "  gradients: 1.0 MB sent a step, 2.9 MB saved by compress (4.0 ×)" in lines
    assert not any(
        "compress" in line for line in summary(trained(), name="r", run_dir=Path("/x"), wall_s=1.0, memory={})
    )


@pytest.mark.case("bytes a step and peak memory, predicted and measured")
def test_a_summary_says_what_a_step_moved_and_the_most_memory_beside_what_was_predicted():
    progress = trained()
    for rank, moved, peak in ((0, 33_500_000.0, 700 << 20), (1, 33_600_000.0, 650 << 20)):
        found = {"step_bytes": moved, "step_bytes_expected": 33_554_432.0, "peak_bytes": peak}
        progress.beats[rank] = dataclasses.replace(
            progress.beats[rank], **found, peak_bytes_expected=680 << 20
        )
    lines = summary(progress, name="r", run_dir=Path("/x/runs/r"), wall_s=75.2, memory={})
    assert "  a step moves 33.6 MB (worker 1; predicted 33.6 MB)" in lines
    assert "  memory, at most 700 MiB (worker 0; predicted 680 MiB before activations)" in lines
    assert all(len(line) <= 80 for line in lines)
    progress.beats[0] = dataclasses.replace(progress.beats[0], activation_bytes=200 << 20)
    assert measured(progress.beats)[1] == "  memory, at most 700 MiB (worker 0; predicted 680 MiB)"


def test_a_summary_leaves_out_what_is_not_known():
    progress = trained()
    assert measured(progress.beats) == []
    progress.beats[0] = dataclasses.replace(progress.beats[0], step_bytes=5e6, peak_bytes=1 << 30)
    assert measured(progress.beats) == [
        "  a step moves 5.0 MB (worker 0)",
        "  memory, at most 1.0 GiB (worker 0)",
    ]
    progress.beats[0] = dataclasses.replace(progress.beats[0], step_bytes=0.0, peak_bytes=None)
    assert measured(progress.beats) == []  # one worker sends nothing to anybody


def test_a_summary_names_the_run_as_the_command_line_finds_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ECHELON_RUNS", raising=False)
    listed = summary(trained(), name="house", run_dir=tmp_path / "runs" / "house", wall_s=1.0, memory={})
    assert listed[-2:] == ["  folder runs/house", "  logs: echelon logs house --rank 0"]
    aside = summary(trained(), name="house", run_dir=tmp_path / "a b" / "run", wall_s=1.0, memory={})
    assert aside[-1] == "  logs: echelon logs 'a b/run' --rank 0"


def test_a_script_alone_ends_with_one_line_and_none_if_it_did_not_train():
    progress = Progress(1)
    assert closing(progress) == []
    progress.take(beat(0, 1, 8, 2.0), 1.0)
    assert closing(progress) == ["trained 1 step, 8 samples, 4 samples/s"]
    progress.take(Metric(step=1, values={"loss": 0.5}), 2.0)
    assert closing(progress) == ["trained 1 step, 8 samples, 4 samples/s · last loss 0.5"]


def test_before_the_first_step_one_line_says_who_is_there():
    clock, err = FakeClock(100.0), io.StringIO()
    display = Display(num_workers=2, err=err, clock=clock, starting=True)
    for _ in range(20):
        display.handle(Beat(rank=0, doing="starting"))
        clock.advance(0.5)
    assert err.getvalue() == "starting 2 workers… 1 is here\n"
    display.handle(Beat(rank=1, doing="starting"))
    assert starting_line(display.progress) == "2 workers are here, no step yet"
    display.handle(PhaseChanged(rank=0, name="tokenize", state="at", share=0.47))
    assert starting_line(display.progress) == "2 workers are here, no step yet · phase tokenize 47%"


@pytest.mark.parametrize(
    ("size", "microbatches", "workers", "words"),
    [
        (64, 1, 2, "32 a worker"),
        (10, 1, 4, "2 or 3 a worker"),
        (512, 2, 2, "128 a worker"),
        (1, 1, 2, "at most 1 a worker (1 of 2 workers has work)"),
        (3, 1, 4, "at most 1 a worker (3 of 4 workers have work)"),
        (7, 2, 4, "at most 1 a worker"),
        (2, 8, 1, "1 a worker"),
    ],
)
def test_the_first_lines_say_what_a_worker_takes_in_one_forward(size, microbatches, workers, words):
    from echelon import facts
    from echelon.data.deal import Cut, micros

    assert facts._each(size, microbatches, workers) == words
    cut = Cut(0, workers, 1, microbatches)
    sizes = {
        hi - lo
        for m in micros([range(size)], 0, cut)
        for lo, hi in (m.dealt(r, workers) for r in range(workers))
    }
    said = {int(number) for number in re.findall(r"\d+", words.partition(" (")[0])}
    assert sizes == said | ({0} if "at most" in words else set())


def test_numbers_and_times_as_people_say_them():
    assert [number(x) for x in (0.123456, 3.0, 1e-9, float("nan"))] == ["0.1235", "3", "1e-09", "nan"]
    assert [duration(x) for x in (0.31, 75.0, 7300.0)] == ["0.3 s", "1 min 15 s", "2 h 1 min"]


def test_a_worker_without_an_exception_of_its_own_speaks_through_its_log():
    verdict = judge({0: Exit(0, 1, 2.0)}, [])
    tail = ["Traceback (most recent call last):", '  File "x.py", line 1', "ImportError: no torch"]
    printed = [*tail, "what the script printed, read later"]
    for log_tail, words in (
        (tail, ": ImportError: no torch"),
        (printed, ": ImportError: no torch"),
        (["hm"], " and left no exception"),
    ):
        block = failure_block(
            verdict, host="box", step=0, log=Path("l"), cause="", log_tail=log_tail, style=False
        )
        assert block[1] == f"worker 0 on box ended with exit code 1{words}"


def test_the_failure_block_ends_with_the_consequences():
    failed = Failed(
        time=1.0,
        rank=1,
        host="box",
        step=17,
        code=1,
        error="ValueError: bad",
        traceback="Traceback\nValueError: bad",
    )
    lost = Failed(
        time=1.1, rank=0, host="box", step=17, code=1, error="PeerLost: x", traceback="", consequence=True
    )
    verdict = judge({2: Exit(2, 143, 2.0, ours=True)}, [failed, lost])
    block = failure_block(
        verdict, host="box", step=16, log=Path("logs/worker-1.log"), cause="", log_tail=[], style=False
    )
    assert block == [
        "", "worker 1 on box failed at step 17: ValueError: bad", "Traceback", "ValueError: bad",
        "log: logs/worker-1.log (worker 1 on box, step 17)", "2 other workers failed as a consequence (0,2)",
    ]  # fmt: skip


@pytest.mark.case("summary")
def test_samples_of_a_killed_worker_are_those_that_count_not_those_of_its_last_beat():
    dealt = Progress(num_workers=2)
    for rank, samples in ((0, 300), (1, 120)):
        dealt.take(Beat(rank=rank, step=10, samples=samples), 1.0)
    dealt.take(Serving(rank=0, samples={"0": 290, "1": 128}), 2.0)  # a beat of worker 0 is newer than that
    assert dealt.samples == 420
    dealt.take(ProcessEnded(rank=1, role="worker", host="h", pid=5, code=137), 3.0)
    assert (dealt.samples, dealt.samples_of(1)) == (428, 128)
    dealt.take(Serving(rank=0, samples={"0": 0}), 4.0)  # another server deals, and knows nothing of worker 1
    assert dealt.samples == 428
    cut = Progress(num_workers=2)
    for rank, samples in ((0, 300), (1, 280)):
        cut.take(Beat(rank=rank, step=10, samples=samples, all_samples=600), 1.0)
    assert cut.samples == 580  # worker 1's next beat has the rest
    cut.take(ProcessStarted(rank=1, role="worker", host="h", pid=6, incarnation=1), 3.0)
    cut.take(Beat(rank=1, step=11, samples=20, all_samples=640), 3.0)
    assert cut.samples == 640
