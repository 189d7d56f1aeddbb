"""A real parameter server process on loopback, for tests: tables, and a service that never answers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from echelon.clock import Deadline
from echelon.control import token as tokens
from echelon.control.handshake import Identity
from echelon.ps.client import SERVE, Client
from echelon.ps.link import Link

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys
from echelon.clock import Deadline
from echelon.ps.frame import Limits
from echelon.ps.host import Host
from echelon.ps.tables import Tables

class Silent:
    def __init__(self):
        self.held = []
    def called(self, request):
        if request.verb == "big":
            import torch
            request.answer({}, [torch.zeros(request.head["numel"])])
        else:
            self.held.append(request)
    def gone(self, peer):
        self.held = [r for r in self.held if r.peer.link != peer.link]

token = sys.stdin.readline().strip()
host = Host({"tables": Tables(), "silent": Silent()}, token, "serve", limits=Limits(**json.loads(sys.argv[1])))
host.start()
print(host.address, flush=True)
sys.stdin.read()
host.close(Deadline.after(5))
print(json.dumps(vars(host.counters)), flush=True)
"""


class LivePs:
    def __init__(self, **limits: Any) -> None:
        self.token = tokens.make()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps({"handshake_s": 5.0, **limits})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(self.token + "\n")
        self.process.stdin.flush()
        self.address = self.process.stdout.readline().strip()
        self.port = int(self.address.partition("/")[0].rpartition(":")[2])

    def link(self, *, shared: bool = True, **options: Any) -> Link:
        who = Identity(SERVE, "worker", 0, os.getpid())
        return Link.connect(self.address, self.token, who, Deadline.after(30), shared=shared, **options)

    def client(self, *, shared: bool = True) -> Client:
        return Client([self.link(shared=shared)])

    def rss_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def num_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def num_threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def num_segments(self) -> int:
        """Pieces of clients' memory that it maps."""
        return Path(f"/proc/{self.process.pid}/maps").read_text().count("memfd:echelon-ps")

    def close(self) -> dict[str, int]:
        """Ends it in good order; gives its counters."""
        out, _ = self.process.communicate(timeout=30)
        assert self.process.returncode == 0
        return dict(json.loads(out.splitlines()[-1]))


@contextlib.contextmanager
def live_ps(**limits: Any) -> Iterator[LivePs]:
    live = LivePs(**limits)
    try:
        yield live
    finally:
        if live.process.poll() is None:
            live.process.kill()
        live.process.wait()
        for pipe in (live.process.stdin, live.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
