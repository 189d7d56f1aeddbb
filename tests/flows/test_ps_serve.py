"""echelon serve: starts, says where it is, and leaves nothing, however it ends."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

import echelon
from tests.conftest import Running, environment, listening_ports, processes_of


@pytest.fixture
def start_serve(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(*options: str, **popen) -> Running:
        command = [sys.executable, "-m", "echelon", "serve", *options]
        started.append(Running(tmp_path, command, environment(tmp_path), **popen))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()
    assert processes_of(str(tmp_path)) == []


def shown(running: Running) -> str:
    return running._out.read_text() + running._err.read_text()


def told(running: Running) -> tuple[str, str]:
    """(address, token file) that it printed."""
    running.until(lambda: running.shows("token "), 60)
    address = re.search(r'connect\("([^"]+)"\)', shown(running))
    token = re.search(r"token +(\S+)", shown(running))
    assert address
    assert token
    return address[1], token[1]


def use(address: str, token_file: str) -> float:
    with echelon.ps.connect(address, token=Path(token_file).read_text().strip()) as ps:
        ps.create("w", torch.zeros(600_000), "sgd", lr=1.0)
        return float(ps.push_pull("w", torch.ones(600_000)).wait().mean())


@pytest.mark.case("echelon serve")
def test_two_servers_say_where_they_are_serve_and_end_on_sigterm(start_serve, tmp_path):
    running = start_serve("--servers", "2")
    address, token_file = told(running)
    assert stat.S_IMODE(os.stat(token_file).st_mode) == 0o600
    assert use(address, token_file) == -1
    assert use(address, token_file) == -2
    running.until(lambda: running.shows("1 tables, 2.3 MiB"))
    running.process.send_signal(signal.SIGTERM)
    result = running.wait(20)
    assert result.code == 0
    assert "Traceback" not in result.out + result.err
    assert not Path(token_file).parent.exists()
    assert not {int(one.rpartition(":")[2]) for one in address.split(",")} & listening_ports()
    assert processes_of(str(tmp_path)) == []


@pytest.mark.case("echelon serve")
def test_ctrl_c_ends_with_130_and_a_given_token_file_stays(start_serve, tmp_path):
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("s" * 40)
    running = start_serve("--token-file", str(file), "--listen", "127.0.0.1")
    address, token_file = told(running)
    assert token_file == str(file)
    assert use(address, token_file) == -1
    running.process.send_signal(signal.SIGINT)
    assert running.wait(20).code == 130
    assert file.read_text() == "s" * 40


@pytest.mark.case("echelon serve")
def test_sigkill_of_its_parent_ends_the_servers(start_serve, tmp_path):
    running = start_serve("--servers", "2")
    told(running)
    running.process.kill()
    running.process.wait()
    running.until(lambda: processes_of(str(tmp_path)) == [], 10)


@pytest.mark.case("echelon serve")
def test_a_server_that_dies_is_named_and_ends_the_others(start_serve, tmp_path):
    running = start_serve("--servers", "2")
    told(running)
    servers = psutil.Process(running.process.pid).children()
    assert len(servers) == 2
    second = next(p for p in servers if p.cmdline()[-1] == "1")
    second.kill()
    result = running.wait(20)
    assert result.code == 69
    assert "server 1 ended by signal 9 (SIGKILL)" in result.err
    assert processes_of(str(tmp_path)) == []


def test_what_cannot_be_served_is_said(start_serve, tmp_path):
    open_file = tmp_path / "open"
    open_file.write_text("s" * 40)
    open_file.chmod(0o644)
    for options, code, text in (
        (("--servers", "0"), 2, "not a number of processes"),
        (("--listen", "0.0.0.0"), 2, "every interface"),
        (("--token-file", str(open_file)), 69, "open to other users"),
        (("--listen", "192.0.2.1"), 69, "cannot listen on 192.0.2.1"),
    ):
        result = start_serve(*options).wait(60)
        assert (result.code, text in result.err) == (code, True), result.err


def test_help_explains_it(tmp_path):
    out = subprocess.run(
        [sys.executable, "-m", "echelon", "serve", "--help"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    ).stdout
    assert "echelon.ps.connect" in out
    assert "--token-file" in out
