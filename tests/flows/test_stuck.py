"""Stuck and desynchronised workers in real runs: who is named, how, how soon, and what follows."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

HOST = os.uname().nodename.split(".")[0]

TRAIN = """
    import os, re, signal, sys, threading, time
    import torch, echelon
    from torch.utils.data import DataLoader, Dataset
    how = sys.argv[1]
    def told():
        print("hang begins", time.time(), flush=True)
    class Samples(Dataset):
        def __len__(self):
            return 600
        def __getitem__(self, i):
            if how in ("getitem", "loader") and os.environ["RANK"] == "1" and i >= 60:
                told()
                time.sleep(1000)  # no sample
            return torch.randn(4), torch.randn(2)
    def hang():
        told()
        if how == "sleep":
            time.sleep(1000)
        elif how == "spin":
            while True: pass
        elif how == "gil":
            re.match(r"(a+)+$", "a" * 64 + "b")
        elif how == "sum":
            sum(range(10**12))
        elif how == "extra":
            run.reduce(1.0, "sum")
        elif how == "barrier":
            torch.distributed.barrier()
        elif how == "left":
            threading.Thread(target=time.sleep, args=(1000,)).start()
            sys.exit(0)
        elif how == "nap":
            time.sleep(14)
        elif how == "long":
            print("at ten", flush=True)
    run = echelon.init()
    model = torch.nn.Linear(4, 2)
    loader = DataLoader(Samples(), batch_size=6, num_workers=2 if how == "loader" else 0)
    model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.01), loader)
    for x, y in loader:
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.2 if how == "long" else 0.02)
        if run.global_step == 10 and run.rank == 1:
            hang()
        if run.global_step == 10 and how == "phase":
            with run.phase("tokenize"):
                time.sleep(26)
"""
QUICK = ("--set", "stuck_s=1")


def alarms(result):
    return [event for event in result.events if event["event"] == "Stuck"]


def after_s(result, rank):
    """From the hang to the alarm."""
    began = max(float(text) for text in re.findall(r"hang begins ([\d.]+)", result.log(rank)))
    return alarms(result)[0]["time"] - began


def line_of(text):
    return next(number for number, line in enumerate(TRAIN.splitlines(), 1) if text in line)


@pytest.mark.slow
@pytest.mark.case("stuck: data")
@pytest.mark.case("stuck: asleep")
@pytest.mark.case("stuck: busy")
@pytest.mark.case("stuck: holds the GIL")
@pytest.mark.case("stuck: exit code 124")
@pytest.mark.case("USERS 1")
@pytest.mark.parametrize(
    ("how", "kind", "culprit_line"),
    [
        ("getitem", "data", "# no sample"),
        ("loader", "data", "# no sample"),
        ("sleep", "asleep", "time.sleep(1000)"),
        ("spin", "busy", "while True: pass"),
        ("gil", "silent", "re.match"),
        ("sum", "silent", "sum(range"),
    ],
)
def test_a_worker_that_does_not_come_is_named_with_its_stack(echelon_run, how, kind, culprit_line):
    result = echelon_run(TRAIN, how, options=QUICK, timeout_s=120)
    assert result.code == 124, result.err
    (told,) = alarms(result)
    assert (told["kind"], told["rank"], told["host"], told["step"]) == (kind, 1, HOST, 10)
    assert told["pid"] == next(
        e["pid"] for e in result.events if e["event"] == "ProcessStarted" and e["rank"] == 1
    )
    assert 9.0 < after_s(result, 1) < 15.0
    if how == "sleep":
        assert any(frame.endswith(" hang") for frame in told["stack"])
    else:
        assert any(f"train.py:{line_of(culprit_line)} " in frame for frame in told["stack"]), told["stack"]
    (other,) = told["others"]
    assert re.match(
        rf"worker 0 \({HOST}:\d+\) waits in all_reduce of gradients \(number \d+\) since \d+ s at ", other
    )
    assert f"train.py:{line_of('.backward()')} in <module>" in other or "train.py" in other
    assert result.err.count(f"stuck ({kind}): worker 1 on {HOST} (pid {told['pid']})") == 2
    last = result.err.rstrip().splitlines()
    assert last[-1] == "The run was stopped 1 s after the alarm (exit code 124)."
    assert all(len(line) <= 80 or "/" in line for line in last[-25:])


@pytest.mark.case("stuck: stopped")
@pytest.mark.case("stuck: goes on")
def test_a_stopped_worker_is_named_and_the_run_goes_on_when_it_does(start_run):
    running = start_run(TRAIN, "long", options=("--set", "stuck_s=60"))
    running.until(lambda: running.shows("at ten"))
    running.kill("worker", 1, signal.SIGSTOP)
    began = time.monotonic()
    running.until(lambda: running.shows(f"stuck (stopped): worker 1 on {HOST}"), 25)
    assert time.monotonic() - began < 15.0
    running.until(lambda: running.shows("its stack, "))
    running.kill("worker", 1, signal.SIGCONT)
    running.until(lambda: running.shows("worker 1 goes on, "))
    result = running.wait(90)
    assert result.code == 0, result.err
    assert [event["event"] for event in result.events if event["event"] in ("Stuck", "Unstuck")] == [
        "Stuck",
        "Unstuck",
    ]


@pytest.mark.case("stuck: different collectives")
def test_workers_in_different_collectives_are_told_both_call_sites_within_10_s(echelon_run):
    result = echelon_run(TRAIN, "extra", workers=3, options=QUICK, timeout_s=90)
    assert result.code == 124, result.err
    (told,) = alarms(result)
    assert told["kind"] == "mismatch"
    assert 1 in told["ranks"]
    assert after_s(result, 1) < 10.0
    others = "\n".join(told["others"])
    assert re.search(
        rf"worker 1 .* waits in all_gather in run.reduce .* at .*train.py:{line_of('run.reduce(1.0')} in hang",
        others,
    )
    assert re.search(r"worker 0 .* waits in all_reduce of gradients .* at .*train.py:\d+ in <module>", others)


@pytest.mark.slow
@pytest.mark.case("stuck: different collectives")
def test_torchs_own_collectives_are_seen_too(echelon_run):
    result = echelon_run(TRAIN, "barrier", options=QUICK, timeout_s=90)
    (told,) = alarms(result)
    assert (result.code, told["kind"]) == (124, "mismatch")
    assert "torch.distributed.barrier" in "".join(told["others"])


@pytest.mark.case("stuck: one call, different values")
def test_calls_that_differ_only_in_their_values_are_told_both_call_sites(echelon_run):
    result = echelon_run("""
        import torch, echelon
        run = echelon.init()
        for _ in range(3):
            run.reduce(torch.ones(4), "sum")
        if run.rank == 0:
            print(run.reduce(torch.ones(4), "sum"))
        else:
            print(run.reduce(torch.ones(5), "sum"))
    """)  # fmt: skip
    assert result.code == 1
    assert (
        "LoopError: the workers are in different collectives: worker 0 called run.reduce(…, 'sum') of "
        in result.err
    )
    assert re.search(
        r"\[4\] at .*train.py:7 in <module>; worker 1 called .* \[5\] at .*train.py:9 in <module>", result.err
    )
    assert "tensor" not in result.out


@pytest.mark.slow
@pytest.mark.case("stuck: absent")
def test_a_worker_whose_script_ended_is_named_although_its_process_is_there(echelon_run):
    result = echelon_run(TRAIN, "left", options=QUICK, timeout_s=90)
    (told,) = alarms(result)
    assert (result.code, told["kind"], told["rank"]) == (124, "absent", 1)
    assert "its script came to its end after step 10" in told["reason"]
    assert after_s(result, 1) < 10.0


@pytest.mark.slow
@pytest.mark.case("stuck: no alarm in a phase")
def test_a_phase_raises_no_alarm_however_long(echelon_run):
    result = echelon_run(TRAIN, "phase", options=QUICK, timeout_s=120)
    assert (result.code, alarms(result)) == (0, []), result.err


@pytest.mark.slow
@pytest.mark.case("stuck: waits")
def test_stuck_wait_only_tells(echelon_run):
    result = echelon_run(TRAIN, "nap", options=("--set", "stuck=wait", "--set", "stuck_s=0"), timeout_s=120)
    assert result.code == 0, result.err
    assert [event["kind"] for event in alarms(result)] == ["asleep"]
    assert "The run waits (stuck=wait)." in result.err
    assert "worker 1 goes on, " in result.err


@pytest.mark.slow
def test_one_worker_alone_that_holds_the_gil_is_named(echelon_run):
    script = TRAIN.replace("run.rank == 1", "run.rank == 0").replace("global_step == 10", "global_step == 60")
    result = echelon_run(script, "gil", workers=1, options=QUICK, timeout_s=90)
    (told,) = alarms(result)
    assert (result.code, told["kind"], told["rank"]) == (124, "silent", 0)
    assert any(
        "re.match" not in frame and f"train.py:{line_of('re.match')} " in frame for frame in told["stack"]
    )
