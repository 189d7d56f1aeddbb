"""Runs over the hosts of netns.py: started as people start them, watched through what they show."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import Running, environment, processes_of
from tests.flows.netns import NetHost, Network

TOLD_S = 10.0
"""What goes wrong is told within this time; the clock starts with the command, so Python's own start is in it."""

SLEEP = """
    import time
    print("up", flush=True)
    time.sleep(300)
"""


class Site:
    """Hosts, and what runs on them. Every host works in a folder of its own or, if asked for, in one that all share."""

    def __init__(self, net: Network, folder: Path) -> None:
        self.net, self.folder = net, folder
        self.hosts: list[NetHost] = net.hosts
        self.token = folder / "the-token"
        self.started: list[Running] = []
        self.script(SLEEP)

    def home(self, index: int) -> Path:
        path = self.folder / f"home{index}"
        path.mkdir(exist_ok=True)
        return path

    def script(self, text: str, *only: int) -> None:
        for index in only or range(len(self.hosts)):
            (self.home(index) / "train.py").write_text(textwrap.dedent(text))

    def run(self, *args: str, listen: str = "", options: tuple[str, ...] = (), workers: int = 2, hosts: int = 0,
            script: str = "train.py", env: dict[str, str] | None = None) -> Running:  # fmt: skip
        """The first host. Its token is agreed on beforehand, unless `env` says otherwise."""
        listen = listen or f"{self.hosts[0].ipv4}:29400"
        words = [
            "run",
            "--hosts",
            str(hosts or len(self.hosts)),
            "--listen",
            listen,
            "--workers",
            str(workers),
            "--name",
            "it",
            "--grace-s",
            "1",
        ]
        return self.start(0, *words, *options, script, *args, env=env)

    def join(self, index: int, *options: str, to: str = "", env: dict[str, str] | None = None) -> Running:
        return self.start(index, "join", to or f"{self.hosts[0].ipv4}:29400", *options, env=env)

    def start(self, index: int, *words: str, env: dict[str, str] | None = None) -> Running:
        home = self.home(index)
        around = environment(self.folder) | {
            "ECHELON_TOKEN": "0123456789abcdef" * 4,
            "ECHELON_RUNS": f"{self.folder}/runs",
        }
        around = {key: value for key, value in (around | (env or {})).items() if value}
        command = self.hosts[index].command(sys.executable, "-m", "echelon", *words)
        self.started.append(Running(home, command, around))
        self.started[-1].run_dir = self.folder / "runs" / "it"
        return self.started[-1]

    def wait_for_nothing(self, timeout_s: float = TOLD_S) -> float:
        start = time.monotonic()
        while left := [*self.net.pids(), *processes_of(str(self.folder))]:
            assert time.monotonic() - start < timeout_s, [_command(pid) for pid in left]
            time.sleep(0.05)
        return time.monotonic() - start


def at(net: Network, folder: Path) -> Iterator[Site]:
    """A Site for the body of a fixture (`yield from at(net, tmp_path)`); whatever still runs at its end is ended."""
    site = Site(net, folder)
    yield site
    for running in site.started:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()
    for pid in net.pids():
        os.kill(pid, signal.SIGKILL)


def shown(running: Running, text: str, timeout_s: float = 30.0) -> float:
    """Seconds from the start until `text` was on the screen, whatever way it is folded."""

    def there() -> bool:
        return text in said(running)

    running.until(there, timeout_s)
    return time.monotonic() - running.started


def said(running: Running) -> str:
    both = running._out.read_text("utf-8", "replace") + running._err.read_text("utf-8", "replace")
    return re.sub(r"\s+", " ", both)


def ends(running: Running, code: int, timeout_s: float = 30.0) -> str:
    assert running.wait(timeout_s).code == code, said(running)
    return said(running)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "?"
