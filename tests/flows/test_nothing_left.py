"""Nothing left: however a run ends, no process, port, token or shared memory of it remains."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.conftest import listening_ports, processes_of, segments, wait_for_nothing

LIMIT_S = 5.0
"""The promise is 10 s; on a busy machine we should be well below it."""

CLINGING = """
    import os, subprocess, sys, signal, time
    # a subprocess in a session of its own, one that ignores SIGTERM, and a daemon that forked twice
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"], start_new_session=True)
    subprocess.Popen([sys.executable, "-S", "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(300)"])
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 3)
            time.sleep(300)
        os._exit(0)
    open(f"/dev/shm/torch_{os.getpid()}_1_1", "w").write("x")
    print("up", flush=True)
    time.sleep(300)
"""

LOADER = """
    import os, time, torch
    from torch.utils.data import DataLoader
    class Slow(torch.utils.data.Dataset):
        def __len__(self): return 10**6
        def __getitem__(self, i):
            time.sleep(0.01)
            return torch.zeros(1000)
    torch.multiprocessing.set_sharing_strategy(os.environ["SHARING"])
    for n, batch in enumerate(DataLoader(Slow(), batch_size=4, num_workers=2, persistent_workers=True)):
        if n == 2: print("up", flush=True)
"""


@pytest.fixture
def seed() -> int:
    value = int(os.environ.get("TEST_SEED", time.time_ns() % 10**6))
    print(f"seed {value}: repeat with TEST_SEED={value}")
    return value


def end(running, how: str) -> int:
    """Ends a run as a person, a kernel or a scheduler would."""
    if how == "ctrl-c":
        running.process.send_signal(signal.SIGINT)
    elif how == "ctrl-c twice":
        running.process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        running.process.send_signal(signal.SIGINT)
    elif how == "terminal closed":
        running.process.send_signal(signal.SIGHUP)
    elif how == "supervisor killed":
        running.process.kill()
    else:
        running.kill(how.removesuffix(" killed"))
    return running.wait(10).code


@pytest.mark.case("Ctrl-C leaves nothing")
@pytest.mark.case("SIGKILL of the supervisor leaves nothing")
@pytest.mark.case("USERS 17")
@pytest.mark.case("nothing left")
@pytest.mark.parametrize(
    ("how", "code"),
    [("ctrl-c", 130), ("ctrl-c twice", 130), ("terminal closed", 129), ("supervisor killed", -9), ("guard killed", 137)],
)  # fmt: skip
def test_nothing_is_left_of_what_clings_to_life(start_run, tmp_path, how, code):
    before = segments()
    running = start_run(CLINGING, workers=2)
    running.until(lambda: running.shows("up (×2)") or running.shows("1] up"))
    running.until(lambda: len(processes_of(str(tmp_path))) >= 10)
    assert end(running, how) == code
    wait_for_nothing(tmp_path, before, LIMIT_S)


@pytest.mark.parametrize("sharing", ["file_descriptor", "file_system"])
@pytest.mark.parametrize("how", ["ctrl-c", "supervisor killed"])
def test_nothing_is_left_of_data_loader_workers(start_run, tmp_path, how, sharing):
    before = segments()
    running = start_run(LOADER, workers=2, env={"SHARING": sharing})
    running.until(lambda: running.shows("up (×2)") or running.shows("1] up"), timeout_s=60)
    end(running, how)
    wait_for_nothing(tmp_path, before, LIMIT_S)


def test_a_failure_takes_everything_along(echelon_run):
    result = echelon_run(CLINGING.replace("time.sleep(300)\n", "time.sleep(300)\n", 1).rsplit("time.sleep(300)", 1)[0]
                         + "raise ValueError('x')\n")  # fmt: skip
    assert result.code == 1


def test_a_script_that_ends_well_leaves_no_daemon(echelon_run):
    result = echelon_run(CLINGING.rsplit("time.sleep(300)", 1)[0])
    assert result.code == 0


def storm(start_run, tmp_path, seed: int, rounds: int) -> None:
    """Ends runs at random moments of their start-up and life."""
    chance = random.Random(seed)
    before = segments()
    for turn in range(rounds):
        how = chance.choice(["ctrl-c", "ctrl-c twice", "supervisor killed", "supervisor killed"])
        moment = chance.uniform(0.0, 0.6)
        print(f"round {turn}: {how} after {moment:.3f} s")
        running = start_run("import time; time.sleep(300)", workers=2)
        time.sleep(moment)
        code = end(running, how)
        said = running.wait().err
        too_early = (
            code == 1 and moment < 0.1 and "KeyboardInterrupt" in said
        )  # python itself was still starting
        assert code in (-9, 130, -2) or too_early, (how, moment, code, said)
        wait_for_nothing(tmp_path, before, LIMIT_S)


def test_a_run_ended_at_any_moment_leaves_nothing(start_run, tmp_path, seed):
    storm(start_run, tmp_path, seed, 12)


@pytest.mark.slow
def test_many_runs_ended_at_any_moment_leave_nothing(start_run, tmp_path, seed):
    storm(start_run, tmp_path, seed, 80)


def test_the_port_is_free_again(start_run, tmp_path):
    before = segments()
    running = start_run(
        "import os, time; print(os.environ['ECHELON_COORDINATOR'], flush=True); time.sleep(300)", workers=1
    )
    running.until(lambda: running.shows("127.0.0.1:"))
    port = int(running._out.read_text().strip().rpartition(":")[2])
    assert port in listening_ports()
    end(running, "supervisor killed")
    wait_for_nothing(tmp_path, before, LIMIT_S)
    assert port not in listening_ports()


def test_processes_that_were_here_before_are_spared(start_run, tmp_path):
    """A shell may start something in the background and then become `echelon run`."""
    import subprocess
    import sys

    from tests.conftest import environment

    (tmp_path / "train.py").write_text("import time; print('up', flush=True); time.sleep(300)")
    command = (
        f"sleep 299 & echo $! > sleeper; exec {sys.executable} -m echelon run --workers 1 train.py > out 2>&1"
    )
    process = subprocess.Popen(["sh", "-c", command], cwd=tmp_path, env=environment(tmp_path))
    deadline = time.monotonic() + 20
    while "up" not in ((tmp_path / "out").read_text() if (tmp_path / "out").exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    sleeper = int((tmp_path / "sleeper").read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    os.kill(sleeper, signal.SIGTERM)  # raises if it is gone
