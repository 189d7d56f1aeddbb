"""echelon serve: parameter servers without a trainer, until somebody ends them.

Each server is a process whose standard input is a pipe from here: when this process is gone, however it went, the pipe ends and so does
the server. What it tells (its address, then how it stands, each second) comes over its standard output, a JSON object a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon import env
from echelon.clock import Deadline
from echelon.control import token as tokens
from echelon.control.net import is_loopback
from echelon.errors import UsageError, WorldError
from echelon.launch import listen

START_S = 60.0
END_S = 8.0
MAX_SERVERS = 256


@dataclass
class Server:
    """One server process, as it is seen from here."""

    rank: int
    process: subprocess.Popen[bytes]
    address: str = ""
    held: bytes = b""
    stats: dict[str, int] = field(default_factory=dict)

    def heard(self) -> bool:
        """Takes what it told. False when it will tell nothing more."""
        assert self.process.stdout is not None
        piece = os.read(self.process.stdout.fileno(), 1 << 16)
        lines = (self.held + piece).split(b"\n")
        self.held = lines.pop()
        for line in lines:
            told = json.loads(line)
            self.address = told.get("address", self.address)
            self.stats = told.get("stats", self.stats)
        return bool(piece)


def serve(
    listen_text: str | None, num_servers: int, token_file: Path | None, timeout_s: float | None = None
) -> int:
    """Runs until SIGTERM or Ctrl-C (or `timeout_s`). Gives the exit code: 0 when it was asked to end, 1 when a server failed."""
    if not 1 <= num_servers <= MAX_SERVERS:
        raise UsageError(f"--servers {num_servers}: from 1 to {MAX_SERVERS} can be started")
    bind, port = listen.choose(listen_text, 1)
    with contextlib.ExitStack() as undo:
        token, where = _token(token_file, undo)
        asked = _Asked()
        undo.callback(asked.undo)
        servers: list[Server] = []
        undo.callback(_end, servers)
        for rank in range(num_servers):
            servers.append(_start(rank, bind, port + rank if port else 0, token, _threads(num_servers)))
        try:
            _wait_for_addresses(servers, asked)
            if not asked.number:
                _tell(servers, bind, where, listen_text)
                _watch(servers, asked, Deadline.after(timeout_s) if timeout_s is not None else None)
        except WorldError:
            if not asked.number:
                raise
        return 128 + asked.number if asked.number == signal.SIGINT else 0


class _Asked:
    """SIGTERM and Ctrl-C, as a number and a pipe that wakes whoever waits."""

    def __init__(self) -> None:
        self.number = 0
        self.reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        self._before = {
            n: signal.signal(n, self._note) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }

    def _note(self, number: int, frame: object) -> None:
        self.number = self.number or number
        with contextlib.suppress(OSError):
            os.write(self._writes, b"x")

    def undo(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        os.close(self.reads)
        os.close(self._writes)


def _token(file: Path | None, undo: contextlib.ExitStack) -> tuple[str, str]:
    """The servers' token, and where a client finds it. A file made here goes when this ends."""
    if file is not None and file.exists():
        return tokens.check(tokens.read(file)), str(file)
    given = None if file is not None else env.take_token()
    if given:
        return tokens.check(given), "ECHELON_TOKEN, as it was given here"
    if file is None:
        folder = Path(tempfile.mkdtemp(prefix="echelon-serve-"))
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        file = folder / "token"
    token = tokens.make()
    try:
        tokens.write(file, token)
    except OSError as error:
        raise UsageError(f"--token-file {file} cannot be written: {error.strerror}") from None
    undo.callback(file.unlink, missing_ok=True)
    return token, str(file)


def _threads(num_servers: int) -> int:
    """Of a server: all have half of the cores among them, the other half is their clients'. What the user set stays."""
    return env.user_threads() or max(1, len(os.sched_getaffinity(0)) // 2 // num_servers)


def _start(rank: int, bind: str, port: int, token: str, num_threads: int) -> Server:
    process = subprocess.Popen(
        [sys.executable, "-m", "echelon.launch.serving", "--rank", str(rank)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env.without_token(),
        start_new_session=True,  # Ctrl-C is for this process, which then ends them
    )
    assert process.stdin is not None
    told = {"rank": rank, "bind": bind, "port": port, "token": token, "threads": num_threads}
    with contextlib.suppress(OSError):
        process.stdin.write(json.dumps(told).encode() + b"\n")
        process.stdin.flush()
    return Server(rank, process)


def _wait_for_addresses(servers: list[Server], asked: _Asked) -> None:
    deadline = Deadline.after(START_S)
    while not asked.number and not all(server.address for server in servers):
        if deadline.passed:
            raise WorldError(f"the servers did not start within {START_S:g} s")
        _hear(servers, asked, deadline.left_s)


def _hear(servers: list[Server], asked: _Asked, timeout_s: float) -> None:
    """Takes what servers tell, for a while at most. WorldError when one is gone."""
    with selectors.DefaultSelector() as ready:
        ready.register(asked.reads, selectors.EVENT_READ)
        for server in servers:
            assert server.process.stdout is not None
            ready.register(server.process.stdout, selectors.EVENT_READ, server)
        for key, _ in ready.select(timeout_s):
            server = key.data
            if server is not None and not server.heard() and not asked.number:
                code = server.process.wait(END_S)
                how = (
                    f"with code {code}" if code >= 0 else f"by signal {-code} ({signal.Signals(-code).name})"
                )
                raise WorldError(
                    f"server {server.rank} ended {how}",
                    remedy="What it said is above; its tables are gone with it.",
                )


def _tell(servers: list[Server], bind: str, where: str, listen_text: str | None) -> None:
    plural = "s" if len(servers) > 1 else ""
    addresses = ",".join(server.address for server in servers)
    print(f"{len(servers)} parameter server{plural}, until Ctrl-C", flush=True)
    print(f'  connect  echelon.ps.connect("{addresses}")', flush=True)
    print(f"  token    {where}", flush=True)
    if is_loopback(bind) and listen_text is None:
        print("  reach    this machine only; --listen ADDR serves others", flush=True)


def _watch(servers: list[Server], asked: _Asked, deadline: Deadline | None) -> None:
    """The live line: on a terminal rewritten each second, elsewhere one when tables or clients change."""
    live, shown = sys.stdout.isatty(), ""
    before, then = 0, time.monotonic()
    while not asked.number and not (deadline is not None and deadline.passed):
        _hear(servers, asked, 1.0)
        now = time.monotonic()
        if now - then < 1.0:
            continue
        total = {key: sum(s.stats.get(key, 0) for s in servers) for key in STATS}
        rate, before, then = (total["updates"] - before) / (now - then), total["updates"], now
        still = (
            f"{total['tables']} tables, {total['bytes'] / (1 << 20):.1f} MiB, {total['clients']} connections"
        )
        if live:
            line = f"{still}, {total['updates']} updates, {rate:,.0f} a second"
            print(f"\r\x1b[2K{line}", end="", flush=True)
        elif still != shown:
            print(still, flush=True)
        shown = still
    if live and shown:
        print(flush=True)


STATS = ("tables", "bytes", "clients", "updates")


def _end(servers: list[Server]) -> None:
    """Ends their input, which ends them; by force if that takes too long."""
    for server in servers:
        with contextlib.suppress(OSError):
            assert server.process.stdin is not None
            server.process.stdin.close()
    deadline = Deadline.after(END_S)
    for server in servers:
        try:
            server.process.wait(max(0.1, deadline.left_s))
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()
        assert server.process.stdout is not None
        server.process.stdout.close()


def stats_line(**numbers: Any) -> bytes:
    """What a server tells each second."""
    return json.dumps({"stats": numbers}).encode() + b"\n"
