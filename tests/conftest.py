"""What every test of real runs shares: start the command line, and see that nothing of it is left."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import needs
from tests.long import LONG, PROCESSES
from tests.once import once as once
from tests.s3_server import s3_server as s3_server

ROOT = Path(__file__).resolve().parents[1]

pytest_plugins = ("tests.dealing", "tests.second_try", "tests.times")

gc.disable()  # until all tests are collected: they stay to the end

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # started in the background: what is started here would be deaf to Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile(
    "busy"
)  # how long one example takes says more about the machine than about the code


@dataclass
class Result:
    """A run that is over."""

    code: int
    out: str
    err: str
    run_dir: Path
    seconds: float

    @property
    def record(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "run.json").read_text()))

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "events.jsonl").read_text().splitlines()]

    def said(self, line: str) -> int:
        """How many workers printed this line: those that come together are told in one, with their number."""
        found = re.finditer(rf"\] {re.escape(line)}(?: \(×(\d+)\))?$", self.out + self.err, re.MULTILINE)
        return sum(int(each[1] or 1) for each in found)

    def log(self, rank: int) -> str:
        return (self.run_dir / "logs" / f"worker-{rank}.log").read_text()


class Running:
    """A run under way. `wait()` gives its Result."""

    def __init__(self, folder: Path, command: list[str], env: dict[str, str], **popen: Any) -> None:
        self.run_dir, self.started = folder / "runs" / "latest", time.monotonic()
        self._out, self._err = folder / f"out-{os.urandom(4).hex()}", folder / f"err-{os.urandom(4).hex()}"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, **popen
            )

    def wait(self, timeout_s: float = 120.0) -> Result:
        code = self.process.wait(timeout_s)
        seconds = time.monotonic() - self.started
        return Result(code, self._out.read_text("utf-8", "replace"), self._err.read_text("utf-8", "replace"),
                      self.run_dir.resolve(), seconds)  # fmt: skip

    def until(self, condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        """Polls until `condition()` is true, and gives it; fails with what the run said at the timeout."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if value := condition():
                return value
            time.sleep(0.02)
        raise AssertionError(f"not within {timeout_s} s; stderr:\n{self._err.read_text('utf-8', 'replace')}")

    def shows(self, text: str) -> bool:
        return text in self._out.read_text("utf-8", "replace") + self._err.read_text("utf-8", "replace")

    def pid(self, role: str, rank: int = 0) -> int | None:
        """The process of a role, None while it is not there."""
        try:
            processes = json.loads((self.run_dir / "processes.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        alive = [p for p in processes if (p["role"], p["rank"]) == (role, rank) and p["code"] is None]
        return int(alive[0]["pid"]) if alive else None

    def kill(self, role: str, rank: int = 0, number: int = signal.SIGKILL) -> None:
        os.kill(self.until(lambda: self.pid(role, rank)), number)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB."""
    needs.use("disk")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """start_run(script, *args, workers=2, options=(), env={}) -> Running. Whatever still runs at the end is ended."""
    started: list[Running] = []

    def start(script: str, *args: str, workers: int = 2, options: tuple[str, ...] = (), env: dict[str, str] | None = None,
              **popen: Any) -> Running:  # fmt: skip
        (tmp_path / "train.py").write_text(textwrap.dedent(script))
        command = [
            sys.executable,
            "-m",
            "echelon",
            "run",
            "--workers",
            str(workers),
            *options,
            "train.py",
            *args,
        ]
        started.append(Running(tmp_path, command, environment(tmp_path) | (env or {}), **popen))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()
    for pid in processes_of(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def echelon_run(start_run: Callable[..., Running], tmp_path: Path) -> Callable[..., Result]:
    """echelon_run(script, *args, workers=2, …) -> Result; checks that nothing was left."""

    def run(script: str, *args: str, timeout_s: float = 60.0, **options: Any) -> Result:
        before = segments()
        result = start_run(script, *args, **options).wait(timeout_s)
        assert leftovers(tmp_path, before) == []
        return result

    return run


_start: dict[str, str] = {}
"""How runs start their processes, when all tests are to start them in another way (--start cold)."""


def environment(folder: Path) -> dict[str, str]:
    """A user's environment in which the package can be imported, with a mark to find the run's processes by."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ECHELON_", "OMP_"))}
    path = os.pathsep.join(filter(None, [str(ROOT), clean.get("PYTHONPATH")]))
    return clean | {"PYTHONPATH": path, "ECHELON_RUNS": str(folder / "runs"), "COLUMNS": "80"} | _start


def segments() -> set[str]:
    """The shared-memory files there are, whoever made them: what a run starts with is not its own."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "psm_", "sem."))}


def _orphans() -> set[str]:
    """Shared memory whose maker is gone (or not known): what others use meanwhile is theirs."""
    return {n for n in segments() if not (n.startswith("torch_") and Path("/proc", n.split("_")[1]).exists())}


def processes_of(marker: str) -> list[int]:
    """Processes that were started with `marker` in ECHELON_RUNS: everything below a run has it, daemons too."""
    wanted = f"ECHELON_RUNS={marker}/runs".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
            except OSError:
                continue
    return found


def listening_ports() -> set[int]:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A"}


def leftovers(folder: Path, segments_before: set[str]) -> list[str]:
    """What is still there of the runs of this folder: processes, their listening ports, shared memory."""
    left = [f"process {pid}: {_command(pid)}" for pid in processes_of(str(folder))]
    ports = listening_ports()
    for file in folder.glob("runs/*/run.json"):
        address = str(json.loads(file.read_text()).get("coordinator", ""))
        if address and int(address.rpartition(":")[2]) in ports:
            left.append(f"port {address}")
        if (file.parent / "token").exists():
            left.append(f"token file of {file.parent.name}")
    return left + [f"/dev/shm/{name}" for name in _lasting(_orphans() - segments_before)]


def _lasting(names: set[str]) -> set[str]:
    """Those that stay: a run of another test, killed in this very moment, is cleaned up by its own guard."""
    deadline = time.monotonic() + 8.0
    while (names := names & _orphans()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return names


def wait_for_nothing(folder: Path, before: set[str], timeout_s: float) -> float:
    """Seconds until nothing was left; fails at the timeout."""
    start = time.monotonic()
    while left := leftovers(folder, before):
        assert time.monotonic() - start < timeout_s, f"still there after {timeout_s} s: {left}"
        time.sleep(0.05)
    return time.monotonic() - start


def wait_for_threads(before: int, timeout_s: float = 10.0) -> None:
    """Until no more threads are here than `before`: those that were told to end may need a moment on a busy machine."""
    deadline = time.monotonic() + timeout_s
    while threading.active_count() > before:
        assert time.monotonic() < deadline, [thread.name for thread in threading.enumerate()]
        time.sleep(0.005)


def stand_still(pid: int, timeout_s: float = 10.0) -> None:
    """SIGSTOP, and back once it took effect: until then other threads of the process go on."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + timeout_s
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    while any((thread / "stat").read_text().rpartition(")")[2].split()[0] != "T" for thread in threads):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return "?"


def pytest_addoption(parser):
    parser.addoption("--start", choices=("fork", "cold"), help="ECHELON_START of all runs: make test-cold")


def pytest_configure(config):
    config.pluginmanager.register(needs.LeftOut())
    if config.getoption("--start"):
        _start["ECHELON_START"] = config.getoption("--start")


def pytest_collection_modifyitems(items):
    """`long.py` says which are slow, and which start processes."""
    for item in items:
        name = str(item.path.relative_to(ROOT / "tests")) + "::" + item.name
        if name in LONG or name.partition("[")[0] in LONG:
            item.add_marker(pytest.mark.slow)
        if name.partition("[")[0] in PROCESSES:
            item.add_marker(pytest.mark.processes)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    if "tests.runs" in sys.modules:
        sys.modules["tests.runs"].look_no_more()


def pytest_collection_finish():
    gc.freeze()  # torch and some thousand tests: no collection looks through them again
    gc.enable()
