"""Several hosts: network namespaces with names of their own, real processes, real cuts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import Running, environment
from tests.equality import zoo
from tests.equality.test_equality import BOUND, difference, plain
from tests.flows.netns import Network, network
from tests.flows.site import TOLD_S, Site, at, ends, said, shown

pytestmark = pytest.mark.needs("hosts")

TRAIN = """
    import os, signal, sys, torch, echelon
    run = echelon.init()
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(640, 4), torch.randint(0, 2, (640,)))
    model, optimizer, loader = run.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
    for epoch in run.epochs(int(sys.argv[1])):
        for x, y in loader:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.global_step == 3 and run.rank == run.world_size - 1:
                print("at step 3", flush=True)
                if "raise" in sys.argv: raise ValueError("the last worker had enough")
                if "die" in sys.argv: os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def two() -> Iterator[Network]:
    with network(2, second_network=True) as made:
        yield made


@pytest.fixture
def site(two: Network, tmp_path: Path) -> Iterator[Site]:
    yield from at(two, tmp_path)


@pytest.fixture
def cut_site(tmp_path: Path) -> Iterator[Site]:
    """Two hosts for a test that spoils them."""
    with network(2) as made:
        yield from at(made, tmp_path)


# the same answer


def equality(site: Site, workers: int, listen: str, out: Path) -> None:
    cells = Path(__file__).parents[1] / "equality" / "cells.py"
    first = site.run(str(out), listen=listen, workers=workers, script=str(cells))
    others = [site.join(i, to=listen) for i in range(1, len(site.hosts))]
    ends(first, 0, 170)
    for other in others:
        ends(other, 0)
    for rank in range(workers):
        results = torch.load(out / f"rank-{rank}.pt")
        for case in zoo.CELLS:
            assert difference(results[case][0], plain(case)) <= BOUND
    site.wait_for_nothing()


@pytest.mark.case("two hosts")
@pytest.mark.case("USERS 8")
def test_two_hosts_end_with_the_weights_of_one_process(site, tmp_path):
    equality(site, 3, f"{site.hosts[0].ipv4}:29400", tmp_path)
    seats = json.loads((tmp_path / "runs" / "it" / "run.json").read_text())["hosts"]
    assert [(s["name"], s["first_rank"], s["num_workers"]) for s in seats] == [("h0", 0, 2), ("h1", 2, 1)]
    processes = json.loads((tmp_path / "runs" / "it" / "processes.json").read_text())
    assert {(p["role"], p["rank"], p["host"]) for p in processes} == {
        ("supervisor", 0, "h0"), ("guard", 0, "h0"), ("coordinator", 0, "h0"), ("worker", 0, "h0"), ("worker", 1, "h0"),
        ("supervisor", 1, "h1"), ("guard", 1, "h1"), ("worker", 2, "h1"),
    }  # fmt: skip
    assert all(p["code"] == 0 for p in processes)


@pytest.mark.slow
@pytest.mark.case("four hosts, one with IPv6 only")
def test_four_hosts_of_which_one_has_only_ipv6(tmp_path):
    with network(4, ipv6_only=(2,)) as net:
        for site in at(net, tmp_path):
            equality(site, 4, "[fd77::1]:29400", tmp_path)


def test_ranks_threads_and_prefixes(site):
    site.script(
        "import os; e = os.environ; print('I', e['RANK'], e['LOCAL_RANK'], e['WORLD_SIZE'], e['OMP_NUM_THREADS'])"
    )
    first = site.run(workers=3)
    other = site.join(1, "--workers", "2")
    text = ends(first, 0)
    cores = len(os.sched_getaffinity(0))
    assert f"[h0:0] I 0 0 3 {cores}" in text
    assert f"[h1:1] I 1 0 3 {max(1, cores // 2)}" in text
    assert f"[h1:2] I 2 1 3 {max(1, cores // 2)}" in text
    there = ends(other, 0)
    assert "[h1:2] I 2 1 3" in there
    assert "h0:" not in there
    logs = {path.name for path in (site.folder / "runs" / "it" / "logs").iterdir()}
    assert logs == {
        "worker-0.log",
        "worker-1.log",
        "worker-2.log",
        "guard-0.log",
        "guard-1.log",
        "coordinator-0.log",
    }


def test_status_and_logs_know_the_other_hosts(site):
    first, other = site.run(), site.join(1)
    shown(first, "[h1:1] up", 60)
    status = site.start(0, "status", "it")
    assert re.search(r"worker 1 +on h1 pid \d+ +alive", ends(status, 0))
    (site.folder / "runs" / "it" / "logs" / "worker-1.log").rename(site.folder / "elsewhere")
    assert "It runs on h1: its log is there" in ends(site.start(0, "logs", "it", "--rank", "1"), 2)
    ends(site.start(0, "stop", "it"), 0)
    assert first.wait(10).code == other.wait(10).code == 143


# how hosts come together


@pytest.mark.case("join before run")
def test_a_host_may_come_first(site):
    other = site.join(1)
    assert shown(other, "cannot be reached from 10.77.0.2 over eth0: refused") < TOLD_S
    first = site.run()
    shown(first, "2 of 2 hosts")
    shown(first, "[h1:1] up")
    first.process.send_signal(signal.SIGINT)
    assert "stopped by Ctrl-C" in ends(first, 130)
    ends(other, 130)
    site.wait_for_nothing()


def test_the_command_for_the_others_works_as_printed(site):
    site.script("print('worked')")
    first = site.run(env={"ECHELON_TOKEN": ""})
    shown(first, "--token-file")
    line = re.search(r"echelon join (\S+) --token-file (\S+)", said(first))
    assert line is not None
    token = Path(line[2]).read_text().strip()
    other = site.join(1, "--token-file", line[2], to=line[1], env={"ECHELON_TOKEN": ""})
    for running in (first, other):
        assert token not in ends(running, 0)
    for path in (site.folder / "runs" / "it").rglob("*"):
        assert path.is_dir() or token not in path.read_text("utf-8", "replace"), path


@pytest.mark.case("a missing host is named")
def test_a_missing_host_is_counted_and_those_who_came_are_named(site):
    first = site.run(hosts=3, workers=3, options=("--join-timeout-s", "5"))
    other = site.join(1)
    text = ends(first, 69)
    assert "1 of 3 hosts did not come in time; those that did: h0 (10.77.0.1), h1 (10.77.0.2)" in text
    assert "1 of 3 hosts did not come in time" in ends(other, 69)
    site.wait_for_nothing()


def test_numbers_that_do_not_fit_are_an_error_on_both_sides(site):
    first, other = site.run(workers=2), site.join(1, "--workers", "2")
    for running in (first, other):
        assert "2 workers cannot be dealt: join --workers says 2 together" in ends(running, 69)


def test_a_host_too_many_is_told_so(cut_site):
    site = cut_site
    first, other = site.run(), site.join(1)
    shown(first, "[h1:1] up")
    late = site.join(1)
    assert "the run has its 2 hosts already" in ends(late, 69)
    first.process.send_signal(signal.SIGTERM)
    first.wait(30)
    other.wait(30)


# what goes wrong is told, on the side that sees it, within 10 s


@pytest.mark.case("wrong token")
def test_a_wrong_token(site):
    first = site.run()
    shown(first, "1 of 2 hosts")
    other = site.join(1, env={"ECHELON_TOKEN": "f" * 64})
    assert "it does not know this token" in ends(other, 69)
    assert other.wait().seconds < TOLD_S
    shown(first, "10.77.0.2 was refused: it came with a wrong token", 5)


def test_another_version_of_the_wire(site):
    first = site.run()
    shown(first, "1 of 2 hosts")
    old = (
        "from echelon.control import handshake; handshake.VERSION = 99; from echelon.cli import main; main()"
    )
    words = ("join", "10.77.0.1:29400")
    command = site.hosts[1].command(sys.executable, "-c", old, *words)
    other = Running(site.home(1), command, environment(site.folder) | {"ECHELON_TOKEN": "f" * 64})
    assert "it speaks another version of the wire" in ends(other, 69)
    assert other.wait().seconds < TOLD_S
    shown(first, "it came with another version of Echelon", 5)


@pytest.mark.case("wrong script")
@pytest.mark.parametrize("there", ["another", "none"])
def test_a_wrong_script(site, there):
    site.script("print('another')", 1)
    if there == "none":
        (site.home(1) / "train.py").unlink()
    first = site.run(script="train.py")
    shown(first, "1 of 2 hosts")
    # the first host's folder is visible here as well, unlike on real hosts: it is taken away
    (site.home(0) / "train.py").write_text("print('changed since')")
    other = site.join(1)
    text = ends(other, 69)
    assert other.wait().seconds < TOLD_S
    told = ends(first, 69)
    if there == "another":
        assert re.search(r"on h1 in \S+home1 has sha256 [0-9a-f]{16}…, on h0 it has [0-9a-f]{16}…", text)
    assert "h1 (10.77.0.2) refused: train.py" in told
    site.wait_for_nothing()


@pytest.mark.case("wrong interface")
def test_an_interface_that_does_not_exist(site):
    first = site.run()
    shown(first, "1 of 2 hosts")
    other = site.join(1, "--interface", "eth7")
    text = ends(other, 69)
    assert "--interface eth7: it is not an interface of this machine" in text
    assert "eth0 10.77.0.2" in text
    assert other.wait().seconds < TOLD_S


@pytest.mark.case("wrong interface")
def test_an_interface_on_another_network(site):
    first = site.run()
    shown(first, "1 of 2 hosts")
    other = site.join(1, "--interface", "eth9")
    text = ends(other, 69)
    assert "does not reach" in text
    assert other.wait().seconds < TOLD_S + 2
    assert "h0 (10.77.0.1) does not reach h1 (10.99.1.1)" in ends(first, 69)


@pytest.mark.case("loopback told to a remote host")
@pytest.mark.parametrize("listen", ["127.0.0.1", "localhost", "me:29400", "[::1]:29400"])
def test_a_first_host_that_listens_where_only_it_can_hear(cut_site_names, listen):
    site = cut_site_names
    first = site.run(listen=listen)
    text = ends(first, 69)
    assert "only this machine reaches it" in text
    assert "interface lo" in text
    assert "--listen ADDR. This machine has: eth0 10.77.0.1" in text
    assert first.wait().seconds < TOLD_S


@pytest.fixture(scope="module")
def named() -> Iterator[Network]:
    with network(2) as net:
        net.names(net.hosts[0], "127.0.0.1 localhost\n127.0.1.1 me\n")
        net.names(net.hosts[1], "127.0.0.1 localhost\n127.0.1.1 h0\n")
        yield net


@pytest.fixture
def cut_site_names(named, tmp_path):
    yield from at(named, tmp_path)


@pytest.mark.case("loopback told to a remote host")
def test_a_name_that_resolves_to_loopback_on_the_other_host(cut_site_names):
    site = cut_site_names
    other = site.join(1, to="h0:29400")
    text = ends(other, 69)
    assert "h0:29400 is 127.0.1.1 here, on interface lo: that is this machine itself" in text
    assert other.wait().seconds < TOLD_S


def test_a_name_without_an_address(site):
    other = site.join(1, "--join-timeout-s", "3", to="nobody.invalid:29400")
    text = ends(other, 69)
    assert "the name 'nobody.invalid' has no address (DNS)" in text
    assert other.wait().seconds < TOLD_S


@pytest.mark.case("blocked port")
def test_a_blocked_port(cut_site):
    site = cut_site
    site.hosts[0].iptables("-A", "INPUT", "-p", "tcp", "--dport", "29400", "-j", "DROP")
    first, other = site.run(), site.join(1)
    assert shown(other, "cannot be reached from 10.77.0.2 over eth0: no answer (timeout)") < TOLD_S
    assert "firewall" in said(other)
    site.hosts[0].iptables("-F")  # and it goes on by itself once the way is free
    shown(first, "2 of 2 hosts")


@pytest.mark.case("blocked port")
def test_ports_between_workers_that_are_blocked_are_told_before_anything_starts(cut_site):
    site = cut_site
    site.hosts[1].iptables("-A", "INPUT", "-p", "tcp", "--syn", "-j", "DROP")
    first, other = site.run(), site.join(1)
    text = ends(first, 69)
    assert "h0 (10.77.0.1) does not reach h1 (10.77.0.2): no answer (timeout" in text
    assert first.wait().seconds < TOLD_S + 4
    assert "does not reach" in ends(other, 69)


def test_a_busy_port_names_who_holds_it(site):
    holder = subprocess.Popen(site.hosts[0].command(sys.executable, "-S", "-c", textwrap.dedent("""
        import socket, time
        s = socket.create_server(("10.77.0.1", 29411)); print("up", flush=True); time.sleep(60)
    """)), stdout=subprocess.PIPE)  # fmt: skip
    assert holder.stdout is not None
    with holder, holder.stdout:
        holder.stdout.readline()
        first = site.run(listen="10.77.0.1:29411")
        text = ends(first, 69)
        holder.kill()
    assert f"port 29411 of 10.77.0.1 is in use by pid {holder.pid}" in text


def test_an_address_of_another_host(site):
    text = ends(site.run(listen="10.77.0.2"), 69)
    assert "no interface of this machine holds that address" in text
    assert "eth0 10.77.0.1" in text


# how it ends


@pytest.mark.case("a failure on another host is told last")
def test_a_failure_on_another_host_is_told_last(site):
    site.script(TRAIN)
    first, other = site.run("9", "raise"), site.join(1)
    text = first.wait(60).err
    assert first.wait().code == 1
    assert "\nworker 1 on h1 failed at step 3: ValueError: the last worker had enough\nTraceback" in text
    assert text.rstrip().splitlines()[-1] == "1 other worker failed as a consequence (0)"
    assert "worker 1: ValueError: the last worker had enough" in ends(other, 1)
    site.wait_for_nothing()


@pytest.mark.case("a worker of another host is killed")
def test_a_worker_killed_on_another_host_is_named_with_cause_and_log(site):
    site.script(TRAIN)
    first, other = site.run("99", "die"), site.join(1)
    text = ends(first, 137, 60)
    assert "worker 1 on h1 was killed by SIGKILL (signal 9)" in text
    assert re.search(r"Its pid was \d+\. Somebody sent it SIGKILL", text)
    assert "last lines of its log: at step 3" in text
    ends(other, 137)
    site.wait_for_nothing()


@pytest.mark.case("a further host's supervisor is killed")
def test_a_killed_supervisor_of_another_host_is_named_and_everything_ends(site):
    site.script(TRAIN)
    first, other = site.run("9999"), site.join(1)
    shown(first, "at step 3", 60)
    other.process.kill()
    start = time.monotonic()
    text = ends(first, 137)
    assert time.monotonic() - start < TOLD_S
    assert "host h1 (10.77.0.2) is gone, and worker 1 with it: its supervisor ended without a word" in text
    site.wait_for_nothing()


def test_a_killed_guard_of_another_host_ends_all(site):
    first, other = site.run(), site.join(1)
    shown(first, "[h1:1] up", 60)
    first.kill("guard", 1)
    assert "the run's guard process was killed, so everything was ended on h1" in ends(first, 137)
    ends(other, 137)
    site.wait_for_nothing()


def test_a_name_with_two_addresses_of_which_one_listens(cut_site):
    site = cut_site
    site.script("print('worked')")
    first, other = site.run(listen="[fd77::1]:29400"), site.join(1, to="h0:29400")
    ends(first, 0)
    ends(other, 0)


@pytest.mark.case("USERS 17 on several hosts")
@pytest.mark.parametrize("when", ["training", "gathering"])
def test_when_the_first_supervisor_is_killed_nothing_is_left_anywhere(site, when):
    site.script(TRAIN)
    first, other = site.run("9999", hosts=2 if when == "training" else 3, workers=3), site.join(1)
    shown(first, "at step 3" if when == "training" else "2 of 3 hosts", 60)
    first.process.kill()
    seconds = site.wait_for_nothing()
    print(f"{when}: nothing left after {seconds:.1f} s")
    other.wait(1)
    assert "is gone" in said(other) or "refused" in said(other)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_at_another_host_ends_all(site, number, code):
    first, other = site.run(), site.join(1)
    shown(first, "[h1:1] up", 60)
    other.process.send_signal(number)
    assert "on h1" in ends(first, code)
    ends(other, code)
    site.wait_for_nothing()


@pytest.mark.case("SIGTERM at another host")
def test_sigterm_at_another_host_saves_everywhere_and_both_go_on(site):
    kept = Path(__file__).with_name("kept.py")
    out = site.folder / "out"
    out.mkdir()
    words = (str(out), "0.1")
    first, other = site.run(*words, options=("--grace-s", "30"), script=str(kept)), site.join(1)
    shown(first, "samples/s", 60)
    other.process.send_signal(signal.SIGTERM)
    assert "stopped in good order (SIGTERM to the supervisor on h1)" in ends(first, 75)
    ends(other, 75)
    site.wait_for_nothing()
    first, other = site.run(*words, options=("--resume",), script=str(kept)), site.join(1)
    assert "goes on from step" in ends(first, 0)
    ends(other, 0)
    assert (out / "digest-0").exists()
    assert (out / "digest-1").exists()


@pytest.mark.case("a host vanishes")
@pytest.mark.case("USERS 3 on several hosts")
def test_a_host_that_vanishes_is_named_within_15_s(cut_site):
    site = cut_site
    site.script(TRAIN)
    first, other = site.run("99999"), site.join(1)
    shown(first, "at step 3", 60)
    site.hosts[1].vanish()
    start = time.monotonic()
    text = ends(first, 137)
    print(f"named after {time.monotonic() - start:.1f} s")
    assert time.monotonic() - start < 20
    assert "host h1 (10.77.0.2) is gone, and worker 1 with it: no sign of life for 10 s" in text
    assert "the first host (h0, 10.77.0.1:29400) is gone: no answer" in ends(other, 137)
    site.wait_for_nothing()


@pytest.mark.case("coordinator restarts")
def test_training_goes_on_when_the_coordinator_is_killed(site):
    site.script(TRAIN)
    first, other = site.run("3"), site.join(1)
    shown(first, "at step 3", 60)
    first.kill("coordinator")
    shown(first, "the coordinator ended (exit code 137) and is started again")
    ends(first, 0, 120)
    ends(other, 0)
    site.wait_for_nothing()


def test_a_flood_of_lines_stays_on_its_host(site):
    site.script("import os\nif os.environ['RANK'] == '1':\n    for i in range(20000): print('line', i)")
    first, other = site.run(), site.join(1)
    ends(first, 0, 60)
    ends(other, 0)
    lines = first.wait().out.count("[h1:1] line")
    assert 200 < lines < 4000
    assert (site.folder / "runs" / "it" / "logs" / "worker-1.log").read_text().count("line") == 20000


@pytest.mark.case("USERS 12 on several hosts")
def test_a_stranger_on_the_network_learns_nothing(site):
    first = site.run()
    shown(first, "1 of 2 hosts")
    knock = """
        import socket, sys, time
        for words in (b"", b"GET / HTTP/1.0\\r\\n\\r\\n", b"\\x00\\x00\\x00\\x05\\x81\\xa1a\\xc0\\xc0"):
            s = socket.create_connection(("10.77.0.1", 29400), 5); s.sendall(words); t = time.monotonic()
            try: got = s.recv(4096)
            except ConnectionError: got = b""
            print(len(got), time.monotonic() - t < 2.0)
    """
    done = subprocess.run(site.hosts[1].command(sys.executable, "-S", "-c", textwrap.dedent(knock)),
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout.split() == ["0", "True"] * 3
