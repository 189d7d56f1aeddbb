"""Groups among hosts: TCP alone, and shared memory with TCP. Ranks are processes that say which host they are on."""

from __future__ import annotations

import re
import signal
import subprocess
import time

import pytest

from tests import torch_processes
from tests.contract import mesh_worker
from tests.flows.netns import network

LONG_S = 240
LIMIT_S = 3

pytestmark = pytest.mark.needs("core")


def start(folder, hosts, *what, spaces=None, addresses=None):
    """One process a rank; `hosts` has a letter for each."""
    addresses, spaces = addresses or ["127.0.0.1"] * len(hosts), spaces or [""] * len(hosts)
    return [
        torch_processes.start(
            mesh_worker.work, rank, len(hosts), folder, addresses[rank], host, *what,
            log=folder / f"log-{rank}", space=spaces[rank],
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip


def finish(folder, started):
    codes = []
    for process in started:
        try:
            codes.append(process.wait(LONG_S))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(process.wait(LONG_S))
    return codes, "\n".join((folder / f"log-{rank}").read_text() for rank in range(len(started)))


def lost(folder, ranks):
    """(peers, when, reason) of each."""
    found = []
    for rank in ranks:
        said = re.fullmatch(r"(\(.*?\)) ([\d.]+) (.*)", (folder / f"lost-{rank}").read_text(), re.S)
        assert said
        found.append((said[1], float(said[2]), said[3]))
    return found


@pytest.mark.case("one contract for every Group")
@pytest.mark.parametrize(
    "hosts",
    ["abc", "aab", pytest.param("aabb", marks=pytest.mark.slow), pytest.param("abcdef", marks=pytest.mark.slow),
     pytest.param("aaabb", marks=pytest.mark.slow), pytest.param("abab", marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_contract(tmp_path, hosts):
    codes, said = finish(tmp_path, start(tmp_path, hosts, "check"))
    assert codes == [0] * len(hosts), said


@pytest.mark.parametrize("hosts", ["aab", "abab"])
def test_messages_within_a_host_go_through_its_memory(tmp_path, hosts):
    codes, said = finish(tmp_path, start(tmp_path, hosts, "messages", hosts))
    assert codes == [0] * len(hosts), said
    for _, _, reason in lost(tmp_path, range(len(hosts))):
        assert "enough" in reason


@pytest.mark.case("random operations among hosts")
@pytest.mark.parametrize(
    ("hosts", "num"),
    [("abc", 300), ("aabb", 300), pytest.param("abcd", 3000, marks=pytest.mark.slow), pytest.param("aabbb", 3000, marks=pytest.mark.slow)],
)  # fmt: skip
def test_random_operations_give_what_the_reference_gives(tmp_path, hosts, num):
    codes, said = finish(tmp_path, start(tmp_path, hosts, "storm", str(num), "7"))
    assert codes == [0] * len(hosts), said


@pytest.mark.case("a rank dies among hosts")
@pytest.mark.parametrize(("hosts", "how"), [("abcd", "busy"), ("aabb", "busy"), ("aabb", "asleep")])
def test_a_rank_that_dies_is_lost_for_everybody_at_once(tmp_path, hosts, how):
    codes, said = finish(tmp_path, start(tmp_path, hosts, "die", how))
    assert codes == [0, 0, 0, -signal.SIGKILL], said
    died = float((tmp_path / "died").read_text())
    for peers, when, reason in lost(tmp_path, range(3)):
        assert peers == "(3,)", reason
        assert "rank 3 is gone" in reason
        assert when - died < 5


@pytest.mark.case("a link is cut in mid-operation")
@pytest.mark.parametrize("how", ["vanish", "link down"])
@pytest.mark.needs("hosts")
def test_a_host_that_vanishes_is_lost_within_the_limit(tmp_path, how):
    """The others see silence: nothing is closed, nothing is reset. The one that vanished sees the same of them."""
    with network(3) as net:
        spaces = [host.space for host in net.hosts]
        addresses = [host.ipv4 for host in net.hosts]
        started = start(tmp_path, "abc", "run_until_lost", spaces=spaces, addresses=addresses)
        give_up = time.monotonic() + LONG_S
        while not all((tmp_path / f"going-{rank}").exists() for rank in range(3)):
            assert time.monotonic() < give_up, finish(tmp_path, started)
            assert all(process.poll() is None for process in started), finish(tmp_path, started)
            time.sleep(0.1)
        cut = time.monotonic()
        if how == "vanish":
            net.hosts[2].vanish()
        else:
            subprocess.run(["ip", "-n", net.switch, "link", "set", "p2", "down"], check=True)
        codes, said = finish(tmp_path, started)
        assert codes == [0, 0, 0], said
        for peers, when, reason in lost(tmp_path, range(2)):
            assert peers == "(2,)", reason
            assert when - cut < LIMIT_S + 5
        (peers, when, reason) = lost(tmp_path, [2])[0]
        assert peers in ("(0,)", "(1,)", "(0, 1)"), reason
        assert when - cut < LIMIT_S + 5


@pytest.mark.case("TCP: garbage in an open stream")
@pytest.mark.parametrize("how", ["garbage", "cut"])
@pytest.mark.parametrize("hosts", ["abc", "aab"])
def test_a_rank_that_sends_garbage_is_lost_for_everybody(tmp_path, hosts, how):
    """It proved the token and was one of us, until something wrote into its stream."""
    codes, said = finish(tmp_path, start(tmp_path, hosts, "spoil", how))
    assert codes == [0, 0, 0], said
    for peers, _, reason in lost(tmp_path, range(2)):
        assert peers == "(2,)", reason
        assert ("not a frame" if how == "garbage" else "the connection to rank 2 is gone") in reason


@pytest.mark.case("TCP: mismatched calls name both sides")
@pytest.mark.parametrize(
    ("how", "called"),
    [("gather", "gather with root 0 of 3"), ("broadcast", "broadcast with root 1 of 70000"), ("size", "all_reduce (sum) of 70000")],
)  # fmt: skip
@pytest.mark.parametrize("hosts", ["aab", "aba"])
def test_different_calls_name_both_sides_wherever_they_are(tmp_path, hosts, how, called):
    codes, said = finish(tmp_path, start(tmp_path, hosts, "differ", how))
    assert codes == [0] * 3, said
    for _, _, reason in lost(tmp_path, range(3)):
        assert "all_reduce (sum) of 3 float32" in reason
        assert (
            f"rank 1 {called}" in reason or "rank 1 barrier" in reason
        )  # a root may be through, and in its next call


def test_a_rank_that_computes_for_longer_than_the_limit_is_not_lost(tmp_path):
    """Its sockets are full and nobody reads them: that is no silence."""
    codes, said = finish(tmp_path, start(tmp_path, "ab", "think", str(2 * LIMIT_S)))
    assert codes == [0, 0], said
