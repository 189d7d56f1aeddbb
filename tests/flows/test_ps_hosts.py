"""echelon serve among hosts: TCP from another one, shared memory on its own, and nobody else is let in."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Running, environment
from tests.flows.netns import NetHost, network

CLIENT = """
import sys, torch, echelon
address, token, local = sys.argv[1], sys.stdin.readline().strip(), sys.argv[2] == "local"
with echelon.ps.connect(address, token=token) as ps:
    assert [link.local for link in ps._links] == [local] * 2, [link.local for link in ps._links]
    for name, numel in (("large", 500_000), ("small", 5)):
        ps.create(name, torch.zeros(numel), lr=1.0)
        for _ in range(3):
            got = ps.push_pull(name, torch.ones(numel)).wait()
        assert got.min() == got.max()
    print(float(got[0]))
"""


def ask(
    host: NetHost, folder: Path, address: str, token: str, where: str
) -> subprocess.CompletedProcess[str]:
    command = host.command(sys.executable, "-c", CLIENT, address, where)
    return subprocess.run(
        command, input=token + "\n", capture_output=True, text=True, env=environment(folder), timeout=90
    )


@pytest.mark.case("ps: servers reached from another host")
@pytest.mark.parametrize("family", [pytest.param("IPv4", marks=pytest.mark.slow), "IPv6"])
@pytest.mark.needs("hosts")
def test_servers_are_reached_over_tcp_from_another_host_and_in_shared_memory_from_their_own(tmp_path, family):
    with network(2) as net:
        first, second = net.hosts
        listen = first.ipv4 if family == "IPv4" else f"[{first.ipv6}]"
        file = tmp_path / "token"
        serve = first.command(
            sys.executable,
            "-m",
            "echelon",
            "serve",
            "--servers",
            "2",
            "--listen",
            listen,
            "--token-file",
            str(file),
        )
        running = Running(tmp_path, serve, environment(tmp_path))
        running.until(lambda: running.shows("token "), 60)
        found = re.search(r'connect\("([^"]+)"\)', running._out.read_text())
        assert found
        token = file.read_text().strip()
        near = ask(first, tmp_path, found[1], token, "local")
        assert near.stdout == "-3.0\n", near.stderr
        far = ask(second, tmp_path, found[1], token, "far")
        assert far.stdout == "-6.0\n", far.stderr
        stranger = ask(second, tmp_path, found[1], "f" * 64, "far")
        assert "does not know this token" in stranger.stderr
        running.process.send_signal(signal.SIGTERM)
        assert running.wait(30).code == 0
        assert net.pids() == []
