"""Parameter servers as processes of a run: started with it, watched like workers, gone with it."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, Running, environment, segments, stand_still, wait_for_nothing
from tests.flows.netns import network
from tests.flows.site import Site, at, ends, shown

PS = ("--servers", "2", "--strategy", "ps")
LIMIT_S = 10.0

UP = """
    import sys, time
    print("up", flush=True)
    time.sleep(float(sys.argv[1]))
"""

MET = """
    import sys, time
    import echelon
    echelon.init()
    print("up", flush=True)
    time.sleep(float(sys.argv[1]))
"""

WAIT = """
    from echelon import activity
    from echelon.clock import Deadline
    from echelon.control import member
    me = member.current()
    print("up", flush=True)
    with activity.waiting("servers 1", activity.ANYBODY, "pull from server 1"):
        me.dial().call("store.get", Deadline.after(200), key="given", timeout_s=190.0, term=me.term)
"""
"""Workers wait for what a server is to set, until somebody does or the server is gone."""

RESET = """
    import os, time
    from echelon.control import member
    me = member.current()
    print("up", flush=True)
    while me.servers().get(1, {"state": "joined"})["state"] == "joined":  # it may still be joining
        time.sleep(0.02)
    raise ConnectionResetError(104, "Connection reset by peer")
"""

TRAIN = """
    import torch, echelon
    run = echelon.init(%s)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(32, 4), torch.zeros(32, dtype=torch.long))
    model, optimizer, loader = run.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
    for x, y in loader:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    print("steps", run.global_step, flush=True)
"""


LONG = """
    import time, torch, echelon
    run = echelon.init()
    model = torch.nn.Sequential(torch.nn.Linear(4, 20000), torch.nn.Linear(20000, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    data = torch.utils.data.TensorDataset(torch.ones(32, 4), torch.zeros(32, dtype=torch.long))
    model, optimizer, loader = run.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
    for _ in run.epochs(100_000):
        for x, y in loader:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.global_step == 10:
                print("up", flush=True)
"""
"""Trains until it is ended; some of its parameters are cut over both servers."""

WAYS = {
    "servers sum": ("--set", "servers_share=1"),
    "servers apply": ("--set", "apply=server", "--set", "replicas=0"),
}

CLIPPED = """
    import torch, echelon
    run = echelon.init()
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.prepare(model, optimizer)
    model(torch.ones(3, 4)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""


UNTIL = """
    import os, time
    print("up", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.05)
"""
"""UP, but until there is a file `go`."""


def up(running: Running) -> None:
    """All workers and both servers are there and have joined."""
    running.until(lambda: running.shows("up (×2)") or (running.shows("0] up") and running.shows("1] up")))
    running.until(lambda: signs(running) == {0, 1})


def signs(running: Running, doing: str = "", after: int = 0) -> set[int]:
    """Which servers gave a sign of life, and said that they are `doing` this, `after` so many lines of the run's events."""
    events = running.run_dir / "events.jsonl"
    lines = events.read_text().splitlines()[after:] if events.exists() else []
    told = [json.loads(line) for line in lines if line.endswith("}")]
    return {e["rank"] for e in told if e["event"] == "Serving" and doing in (e["doing"], "")}


def processes(run_dir: Path) -> dict[tuple[str, int], dict]:
    return {(p["role"], p["rank"]): p for p in json.loads((run_dir / "processes.json").read_text())}


def command(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "echelon", *words],
        cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.case("servers start, serve and leave with the run")
@pytest.mark.case("a server's seat is its own")
def test_servers_start_serve_and_leave_with_the_run(start_run, tmp_path):
    before = segments()
    running = start_run(UNTIL, options=PS)
    up(running)
    running.until(lambda: (running.run_dir / "journal.jsonl").read_text().count("ps/server/") >= 2, 60)
    for rank in range(2):
        pid = running.pid("server", rank)
        line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        assert b"server" in line
        told = dict(
            part.split("=", 1) for part in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in part
        )
        assert told["ECHELON_ROLE"] == "server"
        assert (told["ECHELON_RANK"], told["ECHELON_LOCAL_RANK"], told["ECHELON_WORLD_SIZE"]) == (
            str(rank),
            str(rank),
            "2",
        )
        assert "ECHELON_TOKEN" not in told
    running.until(lambda: signs(running, "serving") == {0, 1})
    status = command("status", "latest", folder=tmp_path).stdout
    assert re.search(r"server 1 +pid \d+ +alive, serving", status), status
    assert re.search(r"worker 1 +pid \d+ +alive", status), status
    (tmp_path / "go").touch()
    result = running.wait()
    assert result.code == 0, result.err
    wait_for_nothing(tmp_path, before, LIMIT_S)
    assert "2 workers × 1 thread + 2 servers" in result.err or "2 servers × " in result.err
    assert re.search(r"server 0: \d+ MiB · server 1: \d+ MiB", result.err)
    assert {key: p["code"] for key, p in processes(result.run_dir).items() if key[0] in ("worker", "server")} == {
        ("worker", 0): 0, ("worker", 1): 0, ("server", 0): 0, ("server", 1): 0,
    }  # fmt: skip
    assert (result.record["num_workers"], result.record["num_servers"]) == (2, 2)
    beats = [e for e in result.events if e["event"] == "Beat"]
    assert {e["rank"] for e in beats} == {0, 1}
    assert not any("duty.py" in frame for e in beats for frame in e["stack"])
    assert command("logs", "latest", "--role", "server", "--rank", "1", folder=tmp_path).returncode == 0


@pytest.mark.case("coordinator restarts")
def test_servers_outlive_a_coordinator_that_is_killed(start_run, tmp_path):
    running = start_run(UNTIL, options=PS)
    up(running)
    running.until(lambda: signs(running, "serving") == {0, 1})
    running.kill("coordinator")
    running.until(lambda: running.shows("is started again"))
    (tmp_path / "go").touch()
    result = running.wait()
    assert result.code == 0, result.err
    assert "the coordinator ended (exit code 137) and is started again" in result.err
    assert [processes(result.run_dir)["server", rank]["code"] for rank in range(2)] == [0, 0]


@pytest.mark.case("a killed server is named")
@pytest.mark.parametrize("script", [WAIT, RESET])
def test_a_killed_server_is_named_and_workers_that_lost_it_are_consequences(start_run, tmp_path, script):
    before = segments()
    running = start_run(script, options=PS)
    up(running)
    pid = running.pid("server", 1)
    running.kill("server", 1)
    killed = time.monotonic()
    result = running.wait()
    print(f"over {time.monotonic() - killed:.1f} s after the kill")
    assert result.code == 137
    last = result.err[result.err.rindex("server 1 on") :] if "server 1 on" in result.err else result.err
    told = re.sub(r"\s+", " ", result.err)
    assert re.search(r"server 1 on \S+ was killed by SIGKILL \(signal 9\)", told), result.err
    assert f"Its pid was {pid}. Somebody sent it SIGKILL" in told
    assert "logs/server-1.log" in told
    assert (
        "2 workers failed as a consequence (0-1)" in last or "2 workers failed as a consequence (0-1)" in told
    )
    assert "Traceback" not in last
    assert processes(result.run_dir)["server", 1]["code"] == 137
    wait_for_nothing(tmp_path, before, LIMIT_S)


@pytest.mark.case("a killed server is named")
@pytest.mark.parametrize("way", WAYS)
def test_a_server_killed_in_mid_training_is_named(start_run, tmp_path, way):
    before = segments()
    running = start_run(LONG, options=(*PS, *WAYS[way]))
    up(running)
    running.kill("server", 1)
    killed = time.monotonic()
    result = running.wait()
    print(f"over {time.monotonic() - killed:.1f} s after the kill")
    assert result.code == 137
    told = re.sub(r"\s+", " ", result.err)
    assert re.search(r"server 1 on \S+ was killed by SIGKILL \(signal 9\)", told), result.err
    assert "2 workers failed as a consequence (0-1)" in told, result.err
    wait_for_nothing(tmp_path, before, LIMIT_S)


@pytest.mark.case("a worker killed among servers is named")
@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("servers_share=1", "the workers hold the weights"),
        pytest.param("update=bounded", "update=bounded has no common step", marks=pytest.mark.slow),
    ],
)
def test_a_worker_killed_in_mid_training_is_named_and_the_others_are_consequences(
    start_run, tmp_path, way, why
):
    before = segments()
    running = start_run(LONG, workers=3, options=(*PS, "--set", way, "--set", "checkpoint_every=5"))
    running.until(lambda: running.shows("up (×3)") or running.shows("2] up"))
    running.until(lambda: running.shows("checkpoint at step"))
    running.kill("worker", 1)
    killed = time.monotonic()
    result = running.wait()
    print(f"over {time.monotonic() - killed:.1f} s after the kill")
    assert result.code == 137
    told = re.sub(r"\s+", " ", result.err)
    assert re.search(r"worker 1 on \S+ was killed by SIGKILL \(signal 9\)", told), result.err
    assert "2 other workers failed as a consequence (0,2)" in told, result.err
    assert not re.search(r"server \d on \S+ (failed|was killed)", told), result.err
    assert f"It was not started again: {why}" in told, result.err
    assert re.search(
        r"the last complete checkpoint is of step \d+: add --resume=\S+ to go on from it", told
    ), told
    wait_for_nothing(tmp_path, before, LIMIT_S)


@pytest.mark.case("ps: .grad of apply=server is never silently a part")
def test_a_script_that_clips_with_torch_is_told_what_to_call(echelon_run):
    result = echelon_run(CLIPPED, options=(*PS, "--set", "apply=server"))
    assert result.code == 2
    told = re.sub(r"\s+", " ", result.err)
    assert (
        "the gradient of `0.weight` is not here: with apply=server the parts of all workers meet on the servers"
        in told
    )
    assert "Clip with run.clip_grad_norm(model, max_norm)" in told
    assert "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)" in result.err  # the script's own line
    fine = echelon_run(CLIPPED, options=(*PS, "--set", "servers_share=1"))
    assert fine.code == 0, fine.err


@pytest.mark.case("a server that fails is told last")
def test_a_server_that_fails_is_told_last_with_its_own_traceback(start_run, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        textwrap.dedent("""
        import os, sys
        if os.environ.get("ECHELON_ROLE") == "server" and os.environ["ECHELON_RANK"] == "0":
            from echelon.ps import duty
            def serve(member, place):
                raise ValueError("this server had enough")
            duty.serve = serve
    """)
    )
    path = os.pathsep.join([str(broken), str(ROOT)])
    cold = {"PYTHONPATH": path, "ECHELON_START": "cold"}  # sitecustomize runs in each process
    result = start_run(WAIT, options=PS, env=cold).wait()
    assert result.code == 1
    assert "ValueError: this server had enough" in result.err
    assert re.search(r"server 0 on \S+ failed: ValueError: this server had enough", result.err), result.err
    assert "raise ValueError" in result.err
    assert result.err.rstrip().endswith("2 workers failed as a consequence (0-1)"), result.err
    said = command("status", "latest", folder=tmp_path).stdout
    assert "server 0 failed at step 0: ValueError: this server had enough" in said


@pytest.mark.case("a stopped server is named")
def test_a_stopped_server_is_named_and_the_run_goes_on_when_it_does(start_run):
    running = start_run(WAIT, options=(*PS, "--set", "stuck_s=60"))
    up(running)
    pid = running.pid("server", 1)
    stand_still(pid)
    stopped = time.monotonic()
    running.until(lambda: running.shows(f"(pid {pid}) is stopped"), 40)
    assert time.monotonic() - stopped < 25
    os.kill(pid, signal.SIGCONT)
    running.until(lambda: running.shows("server 1 goes on"), 20)
    running.process.send_signal(signal.SIGINT)
    result = running.wait()
    assert result.code == 130
    told = re.sub(r"\s+", " ", result.err)
    assert "stuck (stopped): server 1 on" in told
    assert re.search(r"worker 0 \(\S+\) waits in pull from server 1 since", told)
    assert "logs/server-1.log (server 1 on" in told
    stuck = [e for e in result.events if e["event"] == "Stuck"]
    assert [(e["role"], e["rank"]) for e in stuck] == [("server", 1)]


@pytest.mark.case("servers leave nothing")
@pytest.mark.parametrize("how", ["ctrl-c", "supervisor killed", "guard killed", "a worker fails"])
def test_nothing_is_left_of_servers(start_run, tmp_path, how):
    before = segments()
    running = start_run(MET if how == "a worker fails" else UP, "300", options=PS)
    up(running)
    if how == "ctrl-c":
        running.process.send_signal(signal.SIGINT)
    elif how == "supervisor killed":
        running.process.kill()
    elif how == "guard killed":
        running.kill("guard")
    else:
        running.kill("worker", 1)
    code = running.wait(LIMIT_S).code
    assert code == {"ctrl-c": 130, "supervisor killed": -9}.get(how, 137)
    wait_for_nothing(tmp_path, before, LIMIT_S)


@pytest.mark.slow
@pytest.mark.case("servers leave nothing")
def test_a_run_with_servers_that_is_ended_at_any_moment_leaves_nothing(start_run, tmp_path):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    draw, before = random.Random(seed), segments()
    for turn in range(20):
        how, moment = draw.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL]), draw.uniform(0.2, 1.5)
        print(f"round {turn}: {how.name} after {moment:.3f} s")
        running = start_run(UP, "0.4" if draw.random() < 0.3 else "300", options=(*PS, "--grace-s", "1"))
        time.sleep(moment)
        running.process.send_signal(how)
        code = running.wait(20).code
        assert code in (0, -how, 128 + how), (how, moment, code)
        wait_for_nothing(tmp_path, before, LIMIT_S)


@pytest.mark.slow
@pytest.mark.case("a killed server is named")
def test_a_server_killed_at_any_moment_is_named(start_run, tmp_path):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    draw, before = random.Random(seed), segments()
    for turn in range(12):
        rank, moment = draw.randrange(2), draw.uniform(0.0, 0.8)
        print(f"round {turn}: server {rank} after {moment:.3f} s")
        running = start_run(WAIT, options=PS)
        pid = running.until(lambda run=running, rank=rank: run.pid("server", rank))
        time.sleep(moment)
        os.kill(pid, signal.SIGKILL)
        result = running.wait()
        told = re.sub(r"\s+", " ", result.err)
        assert (result.code, f"server {rank} on" in told, f"Its pid was {pid}." in told) == (
            137,
            True,
            True,
        ), result.err
        wait_for_nothing(tmp_path, before, LIMIT_S)


@pytest.mark.case("SIGTERM to a server")
@pytest.mark.case("ps and --resume")
@pytest.mark.parametrize("whom", ["a server", pytest.param("everybody", marks=pytest.mark.slow)])
def test_sigterm_to_a_server_saves_and_the_printed_command_goes_on(tmp_path, whom):
    out = tmp_path / "out"
    out.mkdir()
    script = Path(__file__).with_name("kept.py")
    words = [sys.executable, "-m", "echelon", "run", "--workers", "2", *PS, "--set", "keep=3", "--name", "kept", str(script),
             str(out), "0.05"]  # fmt: skip
    running = Running(tmp_path, words, environment(tmp_path))
    running.run_dir = tmp_path / "runs" / "kept"
    try:
        running.until(lambda: running.shows("samples/s"), 60)
        if whom == "a server":
            running.kill("server", 0, signal.SIGTERM)
        else:  # as schedulers of clusters do it
            process = psutil.Process(running.process.pid)
            for each in [*process.children(recursive=True), process]:
                each.send_signal(signal.SIGTERM)
        result = running.wait()
    finally:
        running.process.kill()
    assert result.code == 75, result.err[-3000:]
    assert whom != "a server" or re.search(
        r"SIGTERM to server 0 on \S+ \(pid \d+\)", re.sub(r"\s+", " ", result.err)
    )
    again = (
        next(line for line in result.err.splitlines() if "go on with" in line)
        .partition("go on with")[2]
        .split()
    )
    assert again[:8] == ["echelon", "run", "--workers", "2", *PS[:2], "--strategy", "ps,keep=3"]
    assert [processes(running.run_dir)["server", rank]["code"] for rank in range(2)] == [0, 0]
    done = subprocess.run(
        [sys.executable, "-m", *again], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "goes on from step" in done.stderr
    assert (out / "digest-0").exists()
    assert shlex.join(again).endswith("0.05")


@pytest.mark.case("ps and --resume")
def test_a_run_whose_servers_apply_goes_on_with_the_same_bits(tmp_path):
    """SIGTERM to a server in mid-run, then --resume: as if nothing had been."""
    script = Path(__file__).with_name("kept.py")
    words = [sys.executable, "-m", "echelon", "run", "--workers", "2", *PS, "--set", "apply=server"]
    for name in ("calm", "stopped"):
        (tmp_path / name).mkdir()

    def go(name: str, *options: str, pause: str) -> Running:
        command = [*words, "--name", name, *options, str(script), str(tmp_path / name), pause]
        return Running(tmp_path, command, environment(tmp_path))

    assert go("calm", pause="0").wait(120).code == 0
    running = go("stopped", pause="0.05")
    running.run_dir = tmp_path / "runs" / "stopped"
    try:
        running.until(lambda: running.shows("samples/s"), 60)
        running.kill("server", 1, signal.SIGTERM)
        result = running.wait()
    finally:
        running.process.kill()
    assert result.code == 75, result.err[-3000:]
    done = go("stopped", "--resume", pause="0").wait(120)
    assert done.code == 0, done.err[-3000:]
    assert "goes on from step" in done.err
    for rank in range(2):
        found = [json.loads((tmp_path / name / f"digest-{rank}").read_text()) for name in ("calm", "stopped")]
        assert found[0] == found[1]


AGAIN = """
import sys
from echelon.cli import main
from echelon.launch import restart
restart.after_end = lambda who, code, incarnation, *known: restart.Again(incarnation + 1, "the test says so")
main()
"""
"""The command line with another decision than this version's: whatever dies is started again."""


@pytest.mark.case("what is started again takes its old seat")
@pytest.mark.parametrize("role", ["server", "worker"])
def test_what_is_started_again_takes_its_old_seat(tmp_path, role):
    (tmp_path / "train.py").write_text(textwrap.dedent(UNTIL))
    words = [sys.executable, "-c", AGAIN, "run", "--workers", "2", *PS, "--name", "again", "train.py"]
    running = Running(tmp_path, words, environment(tmp_path))
    running.run_dir = tmp_path / "runs" / "again"

    def seats() -> list[tuple[int, str]]:
        lines = (running.run_dir / "journal.jsonl").read_text().splitlines()
        told = [json.loads(line) for line in lines if line.endswith("}")]
        mine = [t for t in told if t["kind"] == "member" and (t["role"], t["rank"]) == (role, 1)]
        return [(t["incarnation"], t["state"]) for t in mine]

    try:
        up(running)
        running.kill(role, 1)
        running.until(lambda: seats() == [(0, "joined"), (0, "dead"), (1, "joined")])
        if role == "server":  # one that is sent home before it serves is ended, not waited for
            known = len((running.run_dir / "events.jsonl").read_text().splitlines())
            running.until(lambda: 1 in signs(running, "serving", after=known))
        (tmp_path / "go").touch()
        result = running.wait()
    finally:
        running.process.kill()
    assert result.code == 0, result.err
    found = processes(result.run_dir)[role, 1]
    assert (found["incarnation"], found["code"]) == (1, 0)


@pytest.mark.case("ps in plain python")
def test_ps_in_plain_python_trains_alone(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN % '"ps"'))
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment(tmp_path), capture_output=True,
                          text=True, timeout=60)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "steps 4\n"), done.stderr


@pytest.mark.case("ps and servers go together")
def test_a_script_that_asks_for_ps_in_a_run_without_servers_is_told_what_to_type(echelon_run):
    result = echelon_run(TRAIN % '"ps"')
    assert result.code == 2
    assert "the strategy ps needs parameter servers, and this run has none" in result.err
    assert "echelon run --workers 4 --servers 1 --strategy ps train.py" in result.err


# several hosts


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with network(2) as made:
        yield from at(made, tmp_path)


@pytest.mark.case("servers on two hosts")
@pytest.mark.needs("hosts")
def test_servers_are_dealt_over_hosts_and_leave_with_the_run(site):
    site.script(UP)
    first, other = site.run("3", options=("--servers", "3", "--strategy", "ps")), site.join(1)
    text = ends(first, 0, 60)
    assert "h0 (10.77.0.1) runs 0 and servers 0-1" in text
    assert "h1 (10.77.0.2) runs 1 and server 2" in text
    assert "server 2 of 3" in ends(other, 0)
    found = processes(site.folder / "runs" / "it")
    assert {rank: (found["server", rank]["host"], found["server", rank]["code"]) for rank in range(3)} == {
        0: ("h0", 0), 1: ("h0", 0), 2: ("h1", 0),
    }  # fmt: skip
    logs = {path.name for path in (site.folder / "runs" / "it" / "logs").iterdir()}
    assert {"server-0.log", "server-1.log", "server-2.log"} <= logs
    site.wait_for_nothing()


@pytest.mark.case("servers on hosts of their own")
@pytest.mark.needs("hosts")
def test_a_host_that_joins_without_workers_takes_the_servers(site):
    site.script(TRAIN % "")
    first = site.run(options=("--servers", "1", "--strategy", "ps"), workers=1)
    other = site.join(1, "--workers", "0")
    text = ends(first, 0, 90)
    assert "h0 (10.77.0.1) runs 0 · h1 (10.77.0.2) runs server 0" in text
    assert "steps 4" in text
    assert "host 1 of the run: server 0 of 1" in ends(other, 0)
    site.wait_for_nothing()


@pytest.mark.case("a killed server on another host")
@pytest.mark.needs("hosts")
def test_a_server_killed_on_another_host_is_named(site):
    site.script(WAIT)
    first, other = site.run(options=PS), site.join(1)
    shown(first, "up", 60)
    first.until(lambda: first.pid("server", 1))
    os.kill(first.pid("server", 1), signal.SIGKILL)
    text = ends(first, 137, 30)
    assert "server 1 on h1 was killed by SIGKILL (signal 9)" in text
    assert re.search(r"Its pid was \d+\. Somebody sent it SIGKILL", text)
    assert "2 workers failed as a consequence" in text
    ends(other, 137)
    site.wait_for_nothing()
