"""`echelon run` on one machine: what scripts see, what people see, and what is in the run's folder."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import environment, leftovers, segments, wait_for_nothing

SHOW_SELF = """
    import json, os, sys
    here = {"argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": __file__, "main": sys.modules["__main__"].__file__}
    open(f"seen-{os.environ.get('RANK', 'plain')}.json", "w").write(json.dumps(here))
"""


def test_a_script_sees_what_plain_python_would_show_it(echelon_run, tmp_path):
    result = echelon_run(SHOW_SELF, "--lr", "0.1", "--", "-m", workers=2)
    assert result.code == 0, result.err
    subprocess.run([sys.executable, "train.py", "--lr", "0.1", "--", "-m"], cwd=tmp_path, check=True,
                   env={k: v for k, v in os.environ.items() if k != "RANK"})  # fmt: skip
    plain = (tmp_path / "seen-plain.json").read_text()
    assert (tmp_path / "seen-0.json").read_text() == (tmp_path / "seen-1.json").read_text() == plain


def test_a_module_sees_what_plain_python_would_show_it(start_run, tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "go.py").write_text(textwrap.dedent(SHOW_SELF))
    command = [sys.executable, "-m", "echelon", "run", "--workers", "1", "-m", "pack.go", "--x"]
    subprocess.run(command, cwd=tmp_path, check=True, env=environment(tmp_path), capture_output=True)
    subprocess.run([sys.executable, "-m", "pack.go", "--x"], cwd=tmp_path, check=True)
    assert (tmp_path / "seen-0.json").read_text() == (tmp_path / "seen-plain.json").read_text()


def test_every_process_knows_its_place_and_no_script_sees_the_token(echelon_run):
    result = echelon_run("""
        import os
        names = ["RUN", "RANK", "LOCAL_RANK", "WORLD_SIZE", "ROLE"]
        print(*[os.environ["ECHELON_" + n] for n in names], os.environ["RANK"], os.environ["WORLD_SIZE"])
        print("ECHELON_TOKEN" in str(dict(os.environ)))
    """, workers=2, options=("--name", "here"))  # fmt: skip
    assert result.code == 0, result.err
    assert "here 0 0 2 worker 0 2" in result.out
    assert "here 1 1 2 worker 1 2" in result.out
    assert result.said("False") == 2


@pytest.mark.case("host:rank prefixes")
@pytest.mark.case("duplicates collapsed")
@pytest.mark.case("USERS 25")
def test_lines_carry_host_and_rank_and_equal_ones_are_counted(echelon_run):
    result = echelon_run("""
        import glob, os, sys, time
        folder = os.environ["ECHELON_RUN_DIR"]
        open(f"{folder}/here-{os.environ['RANK']}", "w").close()
        while len(glob.glob(f"{folder}/here-*")) < 3:  # lines that come together are told together
            time.sleep(0.001)
        print("same for all")
        print("mine is", os.environ["RANK"])
        sys.stdout.buffer.write(b"caf\\xe9 \\xff\\n")
        sys.stderr.write("10%\\r50%\\r100%\\n")
        print("no end", end="")
    """, workers=3)  # fmt: skip
    host = os.uname().nodename.split(".")[0]
    assert [result.said(line) for line in ("same for all", "100%", "no end")] == [3, 3, 3]
    assert "same for all (×" in result.out
    for rank in range(3):
        assert f"[{host}:{rank}] mine is {rank}\n" in result.out
    assert b"caf\xe9 \xff\n" in (result.run_dir / "logs" / "worker-1.log").read_bytes()


def test_a_terminal_that_lacks_characters_does_not_end_the_run(echelon_run):
    result = echelon_run("print('caf\\xe9 \\u4e2d')", env={"PYTHONIOENCODING": "ascii:strict"}, workers=1)
    assert "UnicodeEncodeError" in result.log(0)  # the script's own choice is the script's
    assert result.code == 1
    assert "run train-" in result.err


@pytest.mark.case("thread counts")
def test_threads_are_shared_out_and_it_says_so(echelon_run):
    cores = len(os.sched_getaffinity(0))
    result = echelon_run("import os; print('threads', os.environ['OMP_NUM_THREADS'])", workers=2)
    assert result.said(f"threads {max(1, cores // 2)}") == 2
    assert f"2 workers × {max(1, cores // 2)} thread" in result.err
    result = echelon_run("import os; print('threads', os.environ['OMP_NUM_THREADS'])", workers=2,
                         env={"OMP_NUM_THREADS": "3"})  # fmt: skip
    assert result.said("threads 3") == 2
    assert "OMP_NUM_THREADS" in result.err


@pytest.mark.case("per-rank files")
@pytest.mark.case("events.jsonl")
@pytest.mark.case("USERS 25")
def test_the_run_folder_tells_everything(echelon_run, tmp_path):
    result = echelon_run("print('x')", "--a", workers=2, options=("--set", "accumulate=3"))
    record = result.record
    assert (record["script"], record["args"], record["num_workers"], record["code"]) == (
        "train.py",
        ["--a"],
        2,
        0,
    )
    assert record["strategy"]["accumulate"] == 3
    assert record["set_by_user"] == {"accumulate": 3}
    processes = json.loads((result.run_dir / "processes.json").read_text())
    assert {(p["role"], p["rank"]) for p in processes} >= {("worker", 0), ("worker", 1), ("coordinator", 0)}
    assert all(p["pid"] and p["host"] and p["started"] for p in processes)
    assert all(p["code"] == 0 for p in processes)
    kinds = [event["event"] for event in result.events]
    assert kinds.count("ProcessEnded") == 2
    assert kinds.count("Left") == 2
    assert kinds[-1] == "RunEnded"
    assert result.run_dir.name.startswith("train-20")
    assert (tmp_path / "runs" / "latest").resolve() == result.run_dir


def test_the_token_lies_in_a_file_of_its_owner_while_the_run_lasts(start_run, tmp_path):
    running = start_run(
        "import time; print('up', flush=True); time.sleep(60)", workers=1, options=("--grace-s", "1")
    )
    running.until(lambda: running.shows("up"))
    token = running.run_dir / "token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    secret = token.read_text().strip()
    for pid in [running.pid("worker"), running.pid("coordinator"), running.process.pid]:
        assert secret not in Path(f"/proc/{pid}/cmdline").read_text()
    running.process.send_signal(signal.SIGTERM)
    assert running.wait().code == 143
    assert not token.exists()
    assert all(secret not in file.read_text() for file in running.run_dir.rglob("*.json*"))


@pytest.mark.case("two runs in the same second")
@pytest.mark.case("USERS 24")
def test_two_runs_started_in_the_same_second_both_work(start_run, tmp_path):
    first, second = start_run("print('one')", workers=2), start_run("print('one')", workers=2)
    assert (first.wait().code, second.wait().code) == (0, 0)
    assert len([p for p in (tmp_path / "runs").iterdir() if not p.is_symlink()]) == 2


def test_a_worker_that_ends_early_is_no_error(echelon_run):
    result = echelon_run("""
        import os, time
        if os.environ["RANK"] == "1":
            time.sleep(1)
        print("end of", os.environ["RANK"])
    """)  # fmt: skip
    assert result.code == 0
    assert "end of 1" in result.out


@pytest.mark.case("coordinator restarts")
def test_the_coordinator_is_killed_and_the_run_goes_on(start_run, tmp_path):
    before = segments()
    running = start_run("""
        import time
        from echelon.clock import Deadline
        from echelon.control.member import current
        print("up", flush=True)
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            time.sleep(0.05)
        current().call("store.set", Deadline.after(5), key="k", value=b"1")
        print("still served")
    """)  # fmt: skip
    running.until(lambda: running.shows("up"))
    first = running.pid("coordinator")
    running.kill("coordinator")
    running.until(lambda: running.pid("coordinator") not in (None, first))
    result = running.wait()
    assert result.code == 0, result.err
    assert result.said("still served") == 2
    assert "is started again" in result.err
    assert leftovers(tmp_path, before) == []


@pytest.mark.case("echelon runs")
@pytest.mark.case("echelon status")
@pytest.mark.case("echelon logs")
def test_stop_status_logs_and_runs(start_run, tmp_path):
    def echelon(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "echelon", *args], cwd=tmp_path, env=environment(tmp_path),
                              capture_output=True, text=True, timeout=60)  # fmt: skip

    before = segments()
    running = start_run(
        "import time; print('up', flush=True); time.sleep(60)", options=("--name", "long", "--grace-s", "1")
    )
    running.until(lambda: running.shows("up"))
    report = json.loads(echelon("status", "latest", "--json").stdout)
    assert (report["name"], report["state"]) == ("long", "running")
    assert {p["role"] for p in report["processes"] if p["alive"]} == {
        "supervisor",
        "guard",
        "coordinator",
        "worker",
    }
    assert "long" in echelon("runs").stdout
    assert echelon("logs", "long", "--rank", "1").stdout == "up\n"
    missing = echelon("logs", "long", "--rank", "9")
    assert (missing.returncode, "worker-0" in missing.stderr) == (2, True)
    again = echelon("run", "--name", "long", "train.py")
    assert (again.returncode, "exists already" in again.stderr) == (2, True)
    stopped = echelon("stop", "long")
    assert stopped.returncode == 0, stopped.stderr
    assert running.wait(5).code == 143
    wait_for_nothing(tmp_path, before, 3.0)
    assert "stopped (143)" in echelon("runs").stdout
    assert "over already" in echelon("stop", "long").stdout


def test_logs_follow_until_the_run_is_over(start_run, tmp_path):
    running = start_run("""
        import time
        for i in range(3):
            print("line", i, flush=True)
            time.sleep(0.4)
    """, workers=1)  # fmt: skip
    running.until(lambda: running.pid("worker"))
    command = [sys.executable, "-m", "echelon", "logs", "latest", "--follow"]
    followed = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=30
    )
    assert followed.stdout == "line 0\nline 1\nline 2\n"
    assert running.wait().code == 0


def test_nobody_reads_any_more(tmp_path, start_run):
    (tmp_path / "train.py").write_text("while True: print('spam ' * 20)\n")
    before = segments()
    command = f"{sys.executable} -m echelon run --workers 2 train.py | head -3"
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment(tmp_path), capture_output=True, timeout=30
    )
    assert done.stdout.count(b"\n") == 3
    assert b"Traceback" not in done.stderr
    wait_for_nothing(tmp_path, before, 5.0)


@pytest.mark.case("the world does not form")
def test_a_worker_that_never_reports_is_named(tmp_path):
    (tmp_path / "train.py").write_text("print('never')")
    stuck = """
        import os, sys, time
        if os.environ.get("ECHELON_RANK") == "1" and "worker" in sys.orig_argv:
            print("stuck before the first line", flush=True)
            time.sleep(300)
    """
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(stuck))
    program = "from echelon.launch import supervisor; supervisor.JOIN_TIMEOUT_S = 1.5; import echelon.cli; echelon.cli.main()"
    env = environment(tmp_path) | {"ECHELON_START": "cold"}  # sitecustomize runs in each process
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"
    before = segments()
    command = [sys.executable, "-c", program, "run", "--workers", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 69, done.stderr
    assert "the world did not form: no word from worker 1 in 1.5 s" in done.stderr
    assert "stuck before the first line" in done.stderr
    wait_for_nothing(tmp_path, before, 3.0)


def test_a_coordinator_that_cannot_start_is_told(tmp_path):
    (tmp_path / "train.py").write_text("print('never')")
    broken = """
        import os, sys
        if "coordinator" in sys.orig_argv:
            os.write(2, b"no coordinator today\\n")
            os._exit(3)
    """
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(broken))
    env = environment(tmp_path)
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"
    command = [sys.executable, "-m", "echelon", "run", "--workers", "1", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 69, done.stderr
    assert "no coordinator today" in done.stderr


LOOP = """
    import torch, echelon
    from torch.utils.data import DataLoader, TensorDataset
    run = echelon.init({fields})
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=4)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=0.5 * run.global_step)
"""


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    """Everything in the TensorBoard files of a folder: (step, name, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = EventAccumulator(str(folder))
    files.Reload()
    return [
        (e.step, tag, e.tensor_proto.float_val[0])
        for tag in files.Tags()["tensors"]
        for e in files.Tensors(tag)
    ] + [(e.step, tag, e.value) for tag in files.Tags()["scalars"] for e in files.Scalars(tag)]


def plain(tmp_path: Path, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    return subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment(tmp_path) | env,
                          capture_output=True, text=True, timeout=60)  # fmt: skip


@pytest.mark.case("TensorBoard")
@pytest.mark.needs("tensorboard")
def test_tensorboard_files_on_request(echelon_run):
    result = echelon_run("""
        from echelon.control.member import current
        from echelon.events import Logged
        for step in (1, 2):
            current().emit(Logged(step=step, values={"loss": 0.5 * step}, weight=1.0))
    """, options=("--set", "tensorboard=true"))  # fmt: skip
    assert result.code == 0, result.err
    assert scalars(result.run_dir / "tensorboard") == [(1, "loss", 0.5), (2, "loss", 1.0)]


@pytest.mark.slow
@pytest.mark.needs("tensorboard")
def test_a_script_may_ask_for_tensorboard_files_itself(echelon_run):
    result = echelon_run(LOOP.format(fields="tensorboard=True"))
    assert result.code == 0, result.err
    assert scalars(result.run_dir / "tensorboard") == [(1, "loss", 0.5), (2, "loss", 1.0)]
    refused = echelon_run(LOOP.format(fields="tensorboard=True"), options=("--set", "tensorboard=false"))
    assert refused.code == 0, refused.err
    assert not (refused.run_dir / "tensorboard").exists()


@pytest.mark.needs("tensorboard")
def test_tensorboard_files_under_plain_python(tmp_path):
    done = plain(tmp_path, LOOP.format(fields="tensorboard=True, name='here'"))
    assert done.returncode == 0, done.stderr
    assert scalars(tmp_path / "runs" / "here" / "tensorboard") == [(1, "loss", 0.5), (2, "loss", 1.0)]
    assert done.stderr.splitlines()[-1] == "TensorBoard files: runs/here/tensorboard"
    done = plain(tmp_path, LOOP.format(fields="tensorboard=True, run_dir='there'"))
    assert len(scalars(tmp_path / "there" / "tensorboard")) == 2


@pytest.mark.case("plain python")
def test_plain_python_ends_with_what_was_trained(tmp_path):
    done = plain(tmp_path, LOOP.format(fields=""))
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].startswith("trained 2 steps, 8 samples, ")
    assert done.stderr.rstrip().endswith(" samples/s · last loss 1")
    assert not (tmp_path / "runs").exists()
    assert plain(tmp_path, "import echelon; echelon.init()").stderr == ""
    failed = plain(tmp_path, LOOP.format(fields="") + "    raise ValueError('at the end')")
    assert failed.stderr.rstrip().endswith("ValueError: at the end")


def test_what_the_run_says_fits_80_columns_and_is_said_once(echelon_run):
    knobs = ("--set", "accumulate=2", "--set", "microbatches=2", "--set", "clip_norm=1", "--set", "ema=0.99")
    result = echelon_run(LOOP.format(fields="seed=7"), options=knobs)
    assert result.code == 0, result.err
    said = result.err.splitlines()
    assert [line for line in said if len(line) > 80] == []
    assert "  2 micro-batches a batch · accumulate 2: the step's batch is 2 × 4" in said
    assert any(line.startswith("strategy allreduce,") and "seed=7" in line for line in said)
    assert result.err.count("2 workers × ") == 1


def test_a_run_in_a_folder_of_its_own_is_found_by_what_was_printed(echelon_run, tmp_path):
    result = echelon_run("print('hi')", workers=1, options=("--run-dir", "some/run"))
    assert result.code == 0, result.err
    assert result.err.startswith("run train-20")
    (line,) = [line for line in result.err.splitlines() if "logs: " in line]
    assert line == "  logs: echelon logs some/run --rank 0"
    command = [sys.executable, "-m", *line.split()[1:]]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True)
    assert done.stdout == "hi\n"


@pytest.mark.parametrize(
    ("where", "broken"),
    [
        ("before the script", "member.Member.join = classmethod(fail)"),
        ("at its end", "role.Ending.done = fail"),
    ],
)
def test_an_error_of_our_own_is_told_like_any_other(tmp_path, where, broken):
    (tmp_path / "train.py").write_text("print('x')")
    patch = f"""
        import sys
        if "worker" in sys.orig_argv:
            from echelon import role
            from echelon.control import member
            def fail(*args, **kwargs): raise RuntimeError("out of order")
            {broken}
    """
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(patch))
    env = environment(tmp_path) | {"ECHELON_START": "cold"}
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"
    command = [sys.executable, "-m", "echelon", "run", "--workers", "1", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1, done.stderr
    assert re.search(
        r"worker 0 on \S+ (failed|ended with exit code 1): RuntimeError: out of order", done.stderr
    )
    assert done.stderr.count("Traceback") == 1
    assert "left no exception" not in done.stderr
