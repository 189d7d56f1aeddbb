"""Workers and servers are forked from one process that has imported torch: what they rely on holds as if each had been started for itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.conftest import environment, processes_of, segments, wait_for_nothing

BOTH = pytest.mark.parametrize("start", ["fork", "cold"])

SEEN = """
    import json, os, signal, sys, threading, time
    import numpy, torch
    def status(key): return [l.split(":", 1)[1].strip() for l in open("/proc/self/status") if l.startswith(key + ":")]
    seen = {
        "environ": dict(os.environ), "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "main": __file__, "flags": list(sys.flags),
        "environ shown": open("/proc/self/environ", "rb").read().decode().rstrip(chr(0)).split(chr(0)),
        "cmdline": open("/proc/self/cmdline", "rb").read().decode().rstrip(chr(0)).split(chr(0)),
        "affinity": sorted(os.sched_getaffinity(0)), "cgroup": open("/proc/self/cgroup").read(), "cwd": os.getcwd(),
        "fds": sorted(int(n) for n in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + n) and int(n) < 3), "group": os.getpgid(0) == os.getpid(),
        "blocked": status("SigBlk"), "ignored": status("SigIgn"), "umask": status("Umask"),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()], "session": os.getsid(0) == os.getpid(),
        "unbuffered": sys.stdout.write_through, "stdin": os.readlink("/proc/self/fd/0"),
        "named": [t.name for t in threading.enumerate() if t is threading.main_thread()],
    }
    open("seen-%s-%s.json" % (os.environ["WAY"], os.environ["RANK"]), "w").write(json.dumps(seen))
"""


def _differences(one: dict, other: dict) -> dict:
    return {key: (one[key], other[key]) for key in one if one[key] != other[key]}


def test_a_forked_worker_sees_what_one_started_for_itself_would_see(echelon_run, tmp_path):
    seen = {}
    for way in ("fork", "cold"):
        result = echelon_run(SEEN, "--lr", "0.1", "a b", options=("--name", "same"), env={
            "ECHELON_START": way, "WAY": way, "ECHELON_RUNS": str(tmp_path / way)})  # fmt: skip
        assert result.code == 0, result.err
        assert "one by one" not in result.out + result.err
        seen[way] = [json.loads((tmp_path / f"seen-{way}-{rank}.json").read_text()) for rank in range(2)]
    for rank in range(2):
        for all_of in seen.values():
            for words in (
                all_of[rank]["environ shown"],
                [f"{k}={v}" for k, v in all_of[rank]["environ"].items()],
            ):
                assert f"RANK={rank}" in words
            for key in ("ECHELON_COORDINATOR", "ECHELON_RUN_DIR", "ECHELON_RUNS", "WAY", "ECHELON_START"):
                del all_of[rank]["environ"][key]  # ports and folders are each run's own
            shown = dict(word.partition("=")[::2] for word in all_of[rank].pop("environ shown"))
            missing = {k: v for k, v in all_of[rank]["environ"].items() if shown.get(k) != v}
            assert missing == {}
        assert _differences(seen["fork"][rank], seen["cold"][rank]) == {}


@BOTH
@pytest.mark.needs("pgrep")
def test_a_worker_is_found_by_its_script(start_run, tmp_path, start):
    running = start_run(
        "import time; print('up', flush=True); time.sleep(60)",
        "--mark",
        tmp_path.name,
        env={"ECHELON_START": start},
    )
    running.until(lambda: running.shows("up"))
    found = subprocess.run(
        ["pgrep", "-f", f"echelon.role worker.* train.py --mark {tmp_path.name}"],
        capture_output=True,
        text=True,
    )
    assert {int(pid) for pid in found.stdout.split()} == {running.pid("worker", 0), running.pid("worker", 1)}
    assert running.process.pid not in processes_of("elsewhere")
    assert {running.pid("worker", 0), running.pid("worker", 1)} <= set(processes_of(str(tmp_path)))


def test_a_worker_left_on_purpose_is_found(start_run, tmp_path):
    """What "nothing left" stands on: a forked worker that survives its run would be seen."""
    running = start_run("""
        import ctypes, os, time
        if os.fork() == 0:  # a copy of the forked worker, out of everybody's reach
            os.setsid()
            time.sleep(60)
        print("up", flush=True); time.sleep(60)
    """, workers=1)  # fmt: skip
    running.until(lambda: running.shows("up"))
    worker = running.pid("worker")
    assert (
        len(set(processes_of(str(tmp_path)))) >= 5
    )  # supervisor, guard, coordinator, the worker and its copy
    copies = [child.pid for child in psutil.Process(worker).children()]
    assert copies
    assert set(copies) <= set(processes_of(str(tmp_path)))


def test_the_fork_server_goes_when_all_are_there_and_comes_again_for_one(start_run, tmp_path):
    before = segments()
    running = start_run("""
        import echelon, time, torch
        run = echelon.init()
        model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = run.prepare(model, optimizer)
        print("up", flush=True)
        for n in range(10**6):
            loss = model(torch.ones(1, 2)).sum(); loss.backward(); optimizer.step(); optimizer.zero_grad()
            time.sleep(0.02)
    """, options=("--strategy", "ps,update=async", "--servers", "1"))  # fmt: skip
    running.until(lambda: running.shows("up") and running.pid("worker", 1))
    running.until(lambda: not _fork_servers(tmp_path))
    first = running.pid("worker", 1)
    running.kill("worker", 1)
    running.until(lambda: running.pid("worker", 1) not in (None, first))
    running.until(lambda: not _fork_servers(tmp_path))
    second = running.pid("worker", 1)
    parent = Path(f"/proc/{second}/stat").read_text().rpartition(")")[2].split()[1]
    assert int(parent) == running.pid("guard")
    assert not running.shows("one by one")
    running.process.send_signal(signal.SIGINT)
    assert running.wait(20).code == 130
    wait_for_nothing(tmp_path, before, 10)


def _fork_servers(folder: Path) -> list[int]:
    found = []
    for pid in processes_of(str(folder)):
        try:
            if b"\0forkserver\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def test_a_fork_server_that_is_killed_is_done_without(start_run, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
        import sys
        if "forkserver" in sys.orig_argv:
            import time; time.sleep(3)  # so that it can be met
    """)
    )
    path = environment(tmp_path)["PYTHONPATH"]
    running = start_run("print('trained', flush=True)", env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{path}"})
    server = running.until(lambda: _fork_servers(tmp_path))[0]
    os.kill(server, signal.SIGKILL)
    result = running.wait()
    assert result.code == 0, result.err
    assert result.said("trained") == 2
    assert "workers start one by one, not by fork: the process that forks them ended" in " ".join(
        (result.out + result.err).split()
    )


def test_a_thread_before_the_fork_is_named_and_workers_start_one_by_one(start_run, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(300,), daemon=True, name='telemetry').start()\n"
    )
    path = environment(tmp_path)["PYTHONPATH"]
    result = start_run(
        "print('trained', flush=True)", env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{path}"}
    ).wait()
    assert result.code == 0, result.err
    said = " ".join((result.out + result.err).split())
    assert (
        said.count("workers start one by one, not by fork: a thread is there before the fork: telemetry") == 1
    )
    assert result.said("trained") == 2


def test_a_start_that_is_not_known_is_refused_before_anything_starts(start_run, tmp_path):
    result = start_run("print('trained')", env={"ECHELON_START": "warm"}).wait()
    assert result.code == 2
    assert "ECHELON_START=warm is not known\n  Use fork (the default) or cold." in result.err
    assert not (tmp_path / "runs").exists()


def test_thread_counts_above_the_import_of_torch_take_effect(echelon_run):
    result = echelon_run("""
        import os
        os.environ["OMP_NUM_THREADS"] = "3"
        import torch
        print("threads", torch.get_num_threads())
    """, env={"ECHELON_START": "fork"})  # fmt: skip
    assert result.code == 0, result.err
    assert result.said("threads 3") == 2
    assert "ECHELON_START" not in result.out + result.err


def test_a_variable_that_comes_too_late_is_named_with_the_remedy(echelon_run):
    script = """
        import os
        os.environ["TORCH_LOGS"] = "dynamo"
        os.environ["MINE"] = "1"
        import torch
        print("trained")
    """
    result = echelon_run(script)
    assert result.code == 0, result.err
    said = " ".join((result.out + result.err).split())
    assert "TORCH_LOGS set by the script before `import torch`" in said
    assert "start with ECHELON_START=cold" in said
    assert "MINE" not in said
    cold = echelon_run(script, env={"ECHELON_START": "cold"})
    assert "set by the script" not in cold.out + cold.err


def test_random_streams_that_nobody_seeded_differ_among_workers(echelon_run):
    result = echelon_run("""
        import random, numpy, torch
        print("torch", torch.rand(1).item())
        print("numpy", numpy.random.rand())
        print("random", random.random())
    """)  # fmt: skip
    assert result.code == 0, result.err
    for library in ("torch", "numpy", "random"):
        drawn = [line.rpartition(library)[2] for line in result.out.splitlines() if f" {library} 0." in line]
        assert len(set(drawn)) == 2, result.out


def test_torch_compile_works_in_a_forked_worker(echelon_run):
    result = echelon_run("""
        import torch, torch._dynamo
        import echelon
        run = echelon.init()
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        optimizer.step()
        torch._dynamo.config.cache_size_limit = 7
        from torch._dynamo import config
        assert config.cache_size_limit == 7 and config is torch._dynamo.config
        seen = []
        compiled = torch.compile(model, backend=lambda graph, inputs: seen.append(graph) or graph.forward)
        compiled(torch.ones(1, 2)).sum().backward(); optimizer.step()
        print("graphs", len(seen))
    """, workers=1)  # fmt: skip
    assert result.code == 0, result.err
    assert "graphs 1" in result.out


def test_torch_compiles_own_module_waits_until_it_is_needed(echelon_run):
    result = echelon_run("""
        import sys, torch, echelon
        run = echelon.init()
        model = torch.nn.Linear(2, 1); optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model, optimizer = run.prepare(model, optimizer)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward(); optimizer.step(); optimizer.zero_grad()
        print("sympy" in sys.modules, "torch._dynamo.eval_frame" in sys.modules)
    """)  # fmt: skip
    assert result.said("False False") == 2, result.err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_worker_that_dies_at_once_counts(echelon_run, number):
    result = echelon_run(f"import os; os.kill(os.getpid(), {int(number)})", workers=2)
    assert result.code == 128 + number, result.err


def test_the_guard_is_the_parent_and_its_death_is_the_workers(start_run, tmp_path):
    running = start_run("import time; print('up', flush=True); time.sleep(60)")
    running.until(lambda: running.shows("up"))
    worker = running.pid("worker")
    assert int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1]) == running.pid("guard")
    running.kill("guard")
    running.until(lambda: not Path(f"/proc/{worker}").exists(), 10)
    assert running.wait(15).code == 137


def test_servers_and_workers_get_their_own_thread_counts(start_run, tmp_path):
    running = start_run("""
        import time, torch, echelon
        run = echelon.init()
        print("threads", torch.get_num_threads(), flush=True)
        time.sleep(60)
    """, workers=1, options=("--strategy", "ps", "--servers", "1"))  # fmt: skip
    running.until(lambda: running.shows("threads"))
    for role in ("worker", "server"):
        pid = running.until(lambda role=role: running.pid(role))
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        cores = len(os.sched_getaffinity(0))
        wanted = cores if role == "worker" else max(1, cores // 2)
        assert f"OMP_NUM_THREADS={wanted}".encode() in variables


def test_plain_python_is_left_alone(tmp_path):
    (tmp_path / "train.py").write_text(
        "import echelon; run = echelon.init(); import sys, torch\n"
        "print([type(finder).__module__ for finder in sys.meta_path if 'echelon' in type(finder).__module__])"
    )
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True
    )
    assert done.stdout.splitlines()[0] == "[]", done.stdout + done.stderr
