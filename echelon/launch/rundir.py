"""The folder of a run: what is in it, and the only place that makes, names, finds and rewrites it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon import env
from echelon.control import token
from echelon.errors import UsageError


@dataclass
class Process:
    """One line of processes.json. `code` and `ended` are there when it is over; restarts raise `incarnation`."""

    role: str
    rank: int
    host: str
    pid: int
    started: float
    start_ticks: int = 0
    incarnation: int = 0
    code: int | None = None
    ended: float | None = None
    elsewhere: bool = False
    """On another host than the run folder's."""

    @property
    def alive(self) -> bool:
        """Whether this very process still runs here (pids are used again, their start ticks are not); of another
        host's, whether nobody said that it ended."""
        if self.elsewhere:
            return self.code is None
        return self.code is None and self.start_ticks != 0 and start_ticks(self.pid) == self.start_ticks


@dataclass
class RunDir:
    """Paths of one run folder. Files are replaced whole, so that a reader never sees half of one."""

    path: Path
    processes: dict[tuple[str, int], Process] = field(default_factory=dict)
    owned: bool = True
    """Only the first host writes run.json and processes.json: the folder may be on a filesystem that hosts share."""
    tell: Callable[[str], None] | None = None
    """Set once the run is under way: from then on a record that cannot be written is told, once, and costs the record and not
    the run."""
    _late: dict[str, Any] = field(default_factory=dict)
    """Fields of run.json that could not be written yet."""
    _told: bool = False

    @property
    def name(self) -> str:
        return str(self.read().get("name", self.path.name))

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def token(self) -> Path:
        return self.path / "token"

    def log(self, role: str, rank: int) -> Path:
        return self.logs / f"{role}-{rank}.log"

    def read(self) -> dict[str, Any]:
        """run.json, {} when it is not there."""
        return dict(_read(self.path / "run.json", {}))

    def write(self, record: dict[str, Any]) -> bool:
        return self._replace("run.json", json.dumps(record, indent=1, default=str))

    def update(self, **fields: Any) -> None:
        self._late |= fields
        if self.write(self.read() | self._late):
            self._late = {}

    def put(self, process: Process) -> None:
        """Adds or replaces the process in its place (role, rank); processes.json is current when this returns."""
        self.processes[process.role, process.rank] = process
        if self.owned:
            self._replace("processes.json", json.dumps([vars(p) for p in self.processes.values()], indent=1))

    def load_processes(self) -> list[Process]:
        return [Process(**record) for record in _read(self.path / "processes.json", [])]

    def write_token(self, given: str | None = None) -> str:
        """A fresh token of 256 bits (or the one that was given) in a file that only its owner can read."""
        fresh = given or token.make()
        token.write(self.token, fresh)
        return fresh

    def _replace(self, name: str, text: str) -> bool:
        """Puts the file in its place; False when that cannot be now."""
        path, beside = self.path / name, self.path / f".{name}.new"
        try:
            beside.write_text(text + "\n")
            os.replace(beside, path)
            return True
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            if self.tell is None:
                raise _cannot(self.path, error) from None
            if not self._told:
                self._told = True
                self.tell(f"cannot write {name} in the run's folder {self.path}: {error.strerror}. The run goes on; what "
                          "`echelon status` shows is old until there is room.")  # fmt: skip
            return False


def create(script: str, *, name: str | None, run_dir: Path | None, now: float) -> tuple[str, RunDir]:
    """Makes the folder of a new run and points runs/latest at it. Raises UsageError when it is taken."""
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise UsageError(
            f"--name {name!r} cannot name a folder",
            remedy="Use letters, digits, dots, dashes and underscores.",
        )
    if run_dir is not None:
        _make(run_dir, f"--run-dir {run_dir}", may_be_empty=True)
        folder, listed = run_dir, run_dir.resolve().parent == env.runs_dir().resolve()
        name = name or (run_dir.resolve().name if listed else _fresh_name(script, now))
    elif name is not None:
        folder = env.runs_dir() / name
        _make(folder, f"the run {name!r}", may_be_empty=False)
        _point_latest(folder)
    else:
        folder = _make_fresh(script, now)
        name = folder.name
        _point_latest(folder)
    (folder / "logs").mkdir(exist_ok=True)
    return name, RunDir(folder.resolve())


def reopen(folder: RunDir) -> None:
    """An ended run goes on in its folder: logs and events are added to, who was in it is forgotten."""
    (folder.path / "journal.jsonl").unlink(missing_ok=True)
    (folder.path / "logs").mkdir(exist_ok=True)
    if folder.path.parent == env.runs_dir().resolve():
        _point_latest(folder.path)


def find(text: str) -> RunDir:
    """The run that a person means: a name, a folder, `latest`, or the unique beginning of a name."""
    for path in (env.runs_dir() / text, Path(text)):
        if (path / "run.json").exists():
            return RunDir(path.resolve())
    near = [run for run in every() if run.path.name.startswith(text)]
    if len(near) == 1:
        return near[0]
    if near:
        raise UsageError(f"{text!r} may be {len(near)} runs: {', '.join(run.path.name for run in near[:5])}")
    known = ", ".join(run.path.name for run in every()[-3:]) or "none yet"
    raise UsageError(
        f"there is no run {text!r} in {env.runs_dir()}", remedy=f"The newest: {known}. See `echelon runs`."
    )


def every() -> list[RunDir]:
    """All runs of the runs folder, the oldest first."""
    folders = [p for p in env.runs_dir().glob("*/run.json") if not p.parent.is_symlink()]
    runs = [RunDir(path.parent.resolve()) for path in folders]
    return sorted(runs, key=lambda run: float(run.read().get("started", 0.0)))


def start_ticks(pid: int) -> int:
    """When the process started, in ticks since boot; 0 when there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == b"Z" else int(fields[19])


def _fresh_name(script: str, now: float) -> str:
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(script).stem).strip("-.") or "run"
    return f"{stem}-{time.strftime('%Y%m%d', time.localtime(now))}-{secrets.token_hex(2)}"


def _make_fresh(script: str, now: float) -> Path:
    for _ in range(100):
        folder = env.runs_dir() / _fresh_name(script, now)
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise _cannot(folder, error) from None
    raise UsageError(
        f"no free name for a run of {script} in {env.runs_dir()}", remedy="Give one with --name."
    )


def _make(folder: Path, what: str, *, may_be_empty: bool) -> None:
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        if may_be_empty and folder.is_dir() and not any(folder.iterdir()):
            return
        raise UsageError(
            f"{what} exists already", remedy="Choose another, or remove the folder first."
        ) from None
    except OSError as error:
        raise _cannot(folder, error) from None


def _cannot(folder: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write the run's folder {folder}: {error.strerror}",
        remedy="Give a folder that can be written with --run-dir, or set ECHELON_RUNS.",
    )


def _point_latest(folder: Path) -> None:
    link = folder.parent / "latest"
    if link.exists() and not link.is_symlink():
        return
    beside = folder.parent / f".latest-{folder.name}"
    beside.symlink_to(folder.name)
    os.replace(beside, link)


def _read(path: Path, default: Any) -> Any:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return default
