"""A real coordinator process on loopback, for tests: bound here, served there, killed and started again at will."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from echelon.clock import Deadline
from echelon.control import token as tokens
from echelon.control.member import Member
from echelon.control.rpc import Client, Identity
from echelon.env import Place

RUN = "test-run"
ROOT = Path(__file__).resolve().parents[2]
SERVE = """
import sys
from pathlib import Path
from echelon.elastic.coordinator import serve
serve(int(sys.argv[1]), Path(sys.argv[2]), sys.stdin.readline().strip())
"""


class LiveCoordinator:
    """Holds the listening socket, as a supervisor does, so that the address outlives the process."""

    def __init__(self, run_dir: Path, num_workers: int = 2, num_hosts: int = 1) -> None:
        self.run_dir, self.token = run_dir, tokens.make()
        record = {"name": RUN, "num_workers": num_workers, "num_hosts": num_hosts}
        (run_dir / "run.json").write_text(json.dumps(record))
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"
        self.start()

    def start(self) -> None:
        fd = self.listening.fileno()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(fd), str(self.run_dir)],
            pass_fds=[fd],
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdin is not None
        with self.process.stdin as pipe:
            pipe.write(self.token + "\n")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def rss_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def place(self, rank: int = 0, role: str = "worker") -> Place:
        return Place(run=RUN, role=role, rank=rank, world_size=2, coordinator=self.address, host="here")

    def client(self, rank: int = 0, role: str = "worker", *, token: str = "", run: str = RUN) -> Client:
        return Client.connect(
            self.address, token or self.token, Identity(run, role, rank), Deadline.after(20)
        )

    def joiner(self, key: int) -> Client:
        """A further host that has no seat yet."""
        return Client.connect(self.address, self.token, Identity("", "joiner", 0, key), Deadline.after(20))

    def member(self, rank: int = 0, role: str = "worker") -> Member:
        return Member.join(self.place(rank, role), self.token, Deadline.after(20))

    def close(self) -> int:
        """Asks it to end, which takes two requests; gives its exit code."""
        try:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(0.25)
            self.process.send_signal(
                signal.SIGTERM
            )  # no third one: it could come when nobody handles it any more
            return self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait(10)
            self.listening.close()


@contextlib.contextmanager
def coordinator(run_dir: Path, num_workers: int = 2, num_hosts: int = 1) -> Iterator[LiveCoordinator]:
    live = LiveCoordinator(run_dir, num_workers, num_hosts)
    try:
        yield live
    finally:
        live.close()
