"""First error last: the last lines on the terminal are the first failing worker's own, and the exit code is its."""

from __future__ import annotations

import os
import re

import pytest

from tests.conftest import segments, wait_for_nothing
from tests.flows.capped import caps

HOST = os.uname().nodename.split(".")[0]

TRAIN = """
    import os, sys, time, signal
    from echelon.clock import Deadline
    from echelon.control.member import current
    from echelon.events import Beat
    rank, state = int(os.environ["RANK"]), {"step": 0}
    member = current()
    member.report = lambda: Beat(step=state["step"])
    wire = member.dial()
    def meet(step):
        # everybody waits for everybody, as in a collective
        wire.call("store.set", Deadline.after(30), key=f"{step}/{rank}", value=b"")
        wire.call("store.wait", Deadline.after(30), keys=[f"{step}/{r}" for r in range(int(os.environ["WORLD_SIZE"]))], timeout_s=30.0)
"""


def training(at_step_3: str) -> str:
    return (
        TRAIN
        + f"""
    def train(step):
        state["step"] = step
        if rank == 1 and step == 3:
            {at_step_3}
        meet(step)
    for step in range(100):
        train(step)
"""
    )


@pytest.mark.case("first error last")
@pytest.mark.case("USERS 4")
@pytest.mark.case("first error last")
def test_one_of_four_raises_at_step_3(echelon_run):
    result = echelon_run(training('raise ValueError("bad sample 17")'), workers=4)
    assert result.code == 1
    assert result.seconds < 40.0  # nobody waited for a limit of theirs
    last = result.err.rstrip("\n").splitlines()[-20:]
    assert f"worker 1 on {HOST} failed at step 3: ValueError: bad sample 17" in last
    start = last.index("Traceback (most recent call last):")
    assert last[start + 1].strip().endswith("in <module>")
    assert last[-3] == "ValueError: bad sample 17"
    assert re.fullmatch(
        rf"log: runs/latest.*|log: runs/.*/logs/worker-1.log \(worker 1 on {HOST}, step 3\)", last[-2]
    )
    assert last[-1] == "3 other workers failed as a consequence (0,2-3)"
    assert "role.py" not in "\n".join(last)
    assert "runpy" not in "\n".join(last)
    assert "ValueError: bad sample 17" in result.log(1)


@pytest.mark.case("exit code of the first failure")
@pytest.mark.case("SIGBUS names /dev/shm")
@pytest.mark.case("exit codes")
@pytest.mark.parametrize(
    ("action", "code", "words"),
    [
        ("sys.exit(7)", 7, "failed at step 3: sys.exit(7) in "),
        ("sys.exit('no data')", 1, 'failed at step 3: sys.exit("no data") in '),
        ("os._exit(9)", 9, "ended with exit code 9"),
        ("raise KeyboardInterrupt", 130, "failed at step 3: KeyboardInterrupt"),
        ("os.kill(os.getpid(), signal.SIGBUS)", 135, "was killed by SIGBUS (signal 7)"),
        ("os.kill(os.getpid(), signal.SIGABRT)", 134, "was killed by SIGABRT (signal 6)"),
        ("import ctypes; ctypes.string_at(0)", 139, "was killed by SIGSEGV (signal 11)"),
    ],
)
def test_the_exit_code_is_the_first_failures(echelon_run, action, code, words):
    result = echelon_run(training(action), workers=2)
    assert result.code == code, result.err
    block = result.err[result.err.rindex(f"\nworker 1 on {HOST} ") :]
    assert words in block
    assert block.rstrip().endswith("1 other worker failed as a consequence (0)")
    if code == 135:
        assert "/dev/shm has" in block
    if code == 139:
        assert re.search(r'train.py", line \d+ in train', block)


@pytest.mark.case("a worker is killed")
def test_a_worker_is_killed_from_outside(start_run, tmp_path):
    before = segments()
    running = start_run(training("print('at three', flush=True); time.sleep(60)"), workers=3)
    running.until(lambda: running.shows("at three"))
    running.kill("worker", 1)
    result = running.wait(10)
    assert result.code == 137
    assert f"worker 1 on {HOST} was killed by SIGKILL (signal 9)" in result.err
    assert "Somebody sent it SIGKILL; no kill for lack of memory was counted. Its" in result.err
    assert result.err.rstrip().endswith("2 other workers failed as a consequence (0,2)")
    wait_for_nothing(tmp_path, before, 2.0)


def test_a_worker_that_cannot_even_be_compiled_is_told_with_its_own_words(echelon_run):
    result = echelon_run("print('unfinished'", workers=2)
    assert result.code == 1
    assert "SyntaxError: '(' was never closed" in result.err.splitlines()[-3:][0]


def test_a_failed_worker_that_hangs_at_its_end_does_not_hold_up_the_run(echelon_run):
    result = echelon_run("""
        import os, threading, time
        if os.environ["RANK"] == "1":
            threading.Thread(target=time.sleep, args=(60,)).start()
            raise ValueError("with a thread that goes on")
        time.sleep(60)
    """)  # fmt: skip
    assert (result.code, result.seconds < 40.0) == (1, True)
    assert "ValueError: with a thread that goes on" in result.err.splitlines()[-3]


def test_the_same_error_everywhere_is_no_consequence(echelon_run):
    result = echelon_run("raise ValueError('on all')", workers=3)
    assert result.code == 1
    assert result.err.rstrip().endswith("failed by themselves" + result.err.rstrip()[-6:])
    assert result.err.count("Traceback") == 1


def test_a_long_traceback_keeps_its_ends(echelon_run):
    result = echelon_run("""
        def deep(n):
            if n: deep(n - 1) if n % 2 else (lambda: deep(n - 1))()
            else: raise ValueError("deep down")
        deep(60)
    """, workers=1)  # fmt: skip
    lines = result.err.rstrip().splitlines()
    assert len(lines) < 60
    assert "ValueError: deep down" in lines
    assert any("lines more in the log" in line for line in lines)


@pytest.mark.case("SIGKILL named with memory events")
@pytest.mark.case("out of memory")
@pytest.mark.needs("memory")
def test_a_kill_for_lack_of_memory_is_named(start_run, tmp_path):
    with caps(workers=1, nbytes=300 << 20) as groups:
        procs = groups.folders[0] / "cgroup.procs"
        running = start_run("""
            import os, time
            if os.environ["RANK"] == "1":
                time.sleep(0.5)
                held = [bytearray(os.urandom(1 << 20)) for _ in range(2000)]
            time.sleep(60)
        """, preexec_fn=lambda: procs.write_text(str(os.getpid())))  # fmt: skip
        result = running.wait(40)
    assert result.code == 137, result.err
    block = " ".join(result.err[result.err.rindex("\nworker 1 on ") :].split())
    assert "The kernel killed it because its control group ran out of memory (limit 300 MiB)" in block
    assert re.search(r"Its memory peaked at \d+(\.\d)? MiB", block)
