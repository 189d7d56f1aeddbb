"""How much memory a worker may use: what its control group or the machine says, and how many workers of its run live under the same limit."""

from __future__ import annotations

from pathlib import Path

from echelon.mesh.memory import Have

NO_LIMIT = 1 << 60
"""From here on a number means that there is none."""

CGROUPS, PROC = Path("/sys/fs/cgroup"), Path("/proc")


def have(run: str = "", cgroup: str | None = None, root: Path = CGROUPS, proc: Path = PROC) -> Have | None:
    """What a worker of `run` may use on this host's CPU memory: the tightest limit above it. None where nothing can be read."""
    text = cgroup if cgroup is not None else _text(proc / "self" / "cgroup")
    groups = limits(text, root)
    machine = _field(proc / "meminfo", "MemTotal:") + _field(proc / "meminfo", "SwapTotal:")
    if groups and (not machine or groups[0][0] <= machine):
        limit, path = groups[0]
        return Have(limit, "the control group's limit", max(1, sharers(run, path, proc)))
    return Have(machine, "this machine's memory", max(1, sharers(run, "", proc))) if machine else None


def held(proc: Path = PROC) -> int:
    """Bytes that this process has for itself now: no mapped files, nothing shared."""
    return _field(proc / "self" / "status", "RssAnon:")


def counted(proc: Path = PROC) -> int:
    """Bytes that this process accounts for now: its own, and its part of what it shares (gradients in shared memory are mapped by
    every worker of the host, and a plain resident size counts them in each). Takes a millisecond or more: not for every step."""
    return sum(_field(proc / "self" / "smaps_rollup", key) for key in ("Pss_Anon:", "Pss_Shmem:"))


class Peak:
    """The most bytes that this process accounted for at once: the kernel's peak of its resident size, without mapped files and without
    the others' part of what is shared. A look takes some 30 µs, and a millisecond or more when what is shared has changed."""

    def __init__(self, proc: Path = PROC) -> None:
        self.proc, self._shared, self._theirs = proc, 0, 0

    def look(self) -> int | None:
        """None where the kernel does not tell."""
        text = _text(self.proc / "self" / "status")
        peak, files, shared = (_in(text, key) for key in ("VmHWM:", "RssFile:", "RssShmem:"))
        if not peak:
            return None
        if abs(shared - self._shared) > self._shared // 20:
            ours = _field(self.proc / "self" / "smaps_rollup", "Pss_Shmem:")
            self._shared, self._theirs = shared, max(0, shared - ours)
        return max(0, peak - files - self._theirs)


def limits(cgroup: str, root: Path = CGROUPS) -> list[tuple[int, str]]:
    """(bytes, line of /proc/PID/cgroup as far as the group that sets it) of all memory limits above a process, tightest first."""
    found = []
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            bases, name = [root / "memory"], "memory.limit_in_bytes"
        elif not controllers:
            bases, name = [root, root / "unified"], "memory.max"
        else:
            continue
        pieces = [piece for piece in path.split("/") if piece]
        for base in bases:
            for depth in range(len(pieces), -1, -1):
                limit = _number(base.joinpath(*pieces[:depth]) / name)
                if limit is not None and 0 < limit < NO_LIMIT:
                    found.append((limit, f"{number}:{controllers}:/{'/'.join(pieces[:depth])}"))
    return sorted(found, key=lambda each: each[0])


def sharers(run: str, path: str, proc: Path = PROC) -> int:
    """Workers of `run` on this host whose control group is `path` (a line of /proc/PID/cgroup; "" for any) or below it."""
    ranks = set()  # a script's own child processes have its command line too
    for folder in proc.iterdir() if run else ():
        if not folder.name.isdigit():
            continue
        words = _text(folder / "cmdline").split("\0")
        if {"echelon.role", "worker", "--rank", run} <= set(words) and _under(_text(folder / "cgroup"), path):
            ranks.add(words[words.index("--rank") + 1])
    return len(ranks)


def _under(cgroup: str, path: str) -> bool:
    stem = path.rstrip("/")
    return not path or any(line == path or line.startswith(f"{stem}/") for line in cgroup.splitlines())


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _field(path: Path, key: str) -> int:
    """In bytes; the kernel writes kB."""
    return _in(_text(path), key)


def _in(text: str, key: str) -> int:
    for line in text.splitlines():
        words = line.split()
        if words[:1] == [key] and len(words) > 1 and words[1].isdigit():
            return int(words[1]) * 1024
    return 0
