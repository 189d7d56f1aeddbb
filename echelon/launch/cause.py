"""Why a signal may have ended a process: what the kernel's counters say, in a sentence.

`read` looks at the machine; `likely_cause` only judges.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from echelon.mesh.memory import LESS
from echelon.mesh.memory import said as size


@dataclass(frozen=True)
class Memory:
    """What the kernel says about memory around a process. None or 0 where it says nothing."""

    oom_kills: int = 0
    """Kills for lack of memory counted in the process's control group."""

    limit_bytes: int | None = None
    """The memory limit of that group."""

    machine_oom_kills: int = 0
    """Such kills on the whole machine."""

    shm_free_bytes: int | None = None
    shm_total_bytes: int | None = None


def likely_cause(number: int, before: Memory, after: Memory, peak_rss_bytes: int) -> str:
    """A sentence on why signal `number` may have come; "" when there is nothing to add."""
    peak = f"Its memory peaked at {size(peak_rss_bytes)}." if peak_rss_bytes else ""
    if number == signal.SIGKILL:
        if after.oom_kills > before.oom_kills:
            limit = f" (limit {size(after.limit_bytes)})" if after.limit_bytes else ""
            return _join(f"The kernel killed it because its control group ran out of memory{limit}.", peak,
                         f"Give the run more memory or fewer workers. {LESS}")  # fmt: skip
        if after.machine_oom_kills > before.machine_oom_kills:
            return _join("The kernel killed it because the machine ran out of memory.", peak,
                         f"Use fewer workers. {LESS}")  # fmt: skip
        return _join("Somebody sent it SIGKILL; no kill for lack of memory was counted.", peak)
    if number == signal.SIGBUS:
        return _bus(after)
    if number in (signal.SIGSEGV, signal.SIGILL, signal.SIGFPE):
        return _join("Native code crashed (torch, CUDA or a compiled extension).", peak,
                     "Its Python stack at that moment follows.")  # fmt: skip
    if number == signal.SIGABRT:
        return "Native code gave up (abort): its last words are in the log."
    if number == signal.SIGTERM:
        return "Somebody asked it to stop."
    return ""


def read(cgroup: str, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> Memory:
    """The counters now, for a process whose /proc/PID/cgroup has this text; what cannot be read is left out."""
    kills, limit = 0, None
    for line in cgroup.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):  # v1
            folder = _folder(root / "memory", path, "memory.oom_control")
            kills += _field(folder / "memory.oom_control", "oom_kill")
            limit = _number(folder / "memory.limit_in_bytes") or limit
        elif not controllers:  # v2
            for base in (root, root / "unified"):
                folder = _folder(base, path, "memory.events")
                if (folder / "memory.events").exists():
                    kills += _field(folder / "memory.events", "oom_kill")
                    limit = _number(folder / "memory.max") or limit
    try:
        disk = os.statvfs("/dev/shm")
        free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    except OSError:
        free, total = None, None
    return Memory(
        kills, limit if limit and limit < 1 << 60 else None, _field(proc / "vmstat", "oom_kill"), free, total
    )


def cgroup_of(pid: int | str = "self") -> str:
    """/proc/PID/cgroup of a living process (the kernel forgets it when the process ends); "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""


def _bus(now: Memory) -> str:
    if now.shm_total_bytes is None or now.shm_free_bytes is None:
        return "Memory that was mapped could not be had: often a full /dev/shm or a file cut short."
    room = f"/dev/shm has {size(now.shm_free_bytes)} free of {size(now.shm_total_bytes)} now"
    return (
        "Memory that was mapped could not be had: usually /dev/shm is full (DataLoader workers pass batches through "
        f"it) or a mapped file was cut short. {room}. In a container raise --shm-size, or use fewer DataLoader workers."
    )


def _folder(base: Path, path: str, name: str) -> Path:
    """The group's folder; inside a container the path is the host's and the group is mounted at the root."""
    inner = base / path.lstrip("/")
    return inner if (inner / name).exists() else base


def _field(path: Path, key: str) -> int:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _join(*sentences: str) -> str:
    return " ".join(filter(None, sentences))
