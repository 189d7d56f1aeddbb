"""Records wall and CPU time of every test and fixture: `make test TIMES=folder`, then `python -m tests.times folder`.

Each test process appends one JSON object a line to its own file in the folder. CPU is that of the test process and of all
its descendants that were waited for: a run's processes are, because the guard collects them.
"""

from __future__ import annotations

import collections
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_launches = 0
"""Runs that this test process has started so far: `echelon run`, or a script of a run in plain Python."""


def _count(event: str, arguments: tuple[Any, ...]) -> None:
    global _launches
    if event == "subprocess.Popen":
        command = [str(word) for word in arguments[1] or ()]
        _launches += "echelon" in command and "run" in command


def _spent() -> tuple[float, float, int]:
    """Wall seconds, CPU seconds and launches so far, of this process and what it has collected."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.monotonic(), sum(u.ru_utime + u.ru_stime for u in used), _launches


class Recorder:
    """One test process's record. Entries: {"kind": "test" | "fixture", "name", "wall_s", "cpu_s", "launches", …}."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)
        sys.addaudithook(_count)

    def _note(self, kind: str, name: str, before: tuple[float, float, int], **more: Any) -> None:
        wall_s, cpu_s, launches = (after - b for after, b in zip(_spent(), before, strict=True))
        entry = {
            "kind": kind,
            "name": name,
            "wall_s": round(wall_s, 4),
            "cpu_s": round(cpu_s, 4),
            "launches": launches,
        }
        self._file.write(json.dumps(entry | more) + "\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = _spent()
        try:
            return (yield)
        finally:
            self._note("test", item.nodeid, before, started=before[0])

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: pytest.FixtureRequest) -> Iterator[None]:
        before = _spent()
        try:
            return (yield)
        finally:
            self._note(
                "fixture", f"{fixturedef.baseid}::{fixturedef.argname}", before, scope=fixturedef.scope
            )


def pytest_configure(config: pytest.Config) -> None:
    folder = os.environ.get("ECHELON_TEST_TIMES")
    if folder:
        config.pluginmanager.register(Recorder(Path(folder)), "echelon-times")


def entries(folder: Path) -> list[dict[str, Any]]:
    """Everything that was recorded there."""
    return [
        json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()
    ]


def table(found: list[dict[str, Any]], top: int = 40) -> str:
    """Files by wall time, then the slowest tests and fixtures."""
    tests = [entry for entry in found if entry["kind"] == "test"]
    total = _sum(tests)
    lines = [
        f"{len(tests)} tests · {total[0]:.0f} s wall added up · {total[1]:.0f} s CPU · {total[2]} launches",
        "",
    ]
    lines += ["| file | tests | wall s | CPU s | launches |", "|---|---|---|---|---|"]
    files: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for entry in tests:
        files[entry["name"].partition("::")[0]].append(entry)
    for name, rows in sorted(files.items(), key=lambda pair: -_sum(pair[1])[0]):
        wall_s, cpu_s, launches = _sum(rows)
        if wall_s >= 1.0:
            lines.append(f"| {name} | {len(rows)} | {wall_s:.1f} | {cpu_s:.1f} | {launches} |")
    for kind in ("test", "fixture"):
        lines += ["", f"| {kind} | wall s | CPU s | launches |", "|---|---|---|---|"]
        rows = sorted((entry for entry in found if entry["kind"] == kind), key=lambda entry: -entry["wall_s"])
        lines += [
            f"| {r['name']} | {r['wall_s']:.1f} | {r['cpu_s']:.1f} | {r['launches']} |" for r in rows[:top]
        ]
    return "\n".join(lines)


def _sum(rows: list[dict[str, Any]]) -> tuple[float, float, int]:
    return sum(r["wall_s"] for r in rows), sum(r["cpu_s"] for r in rows), sum(r["launches"] for r in rows)


if __name__ == "__main__":
    print(table(entries(Path(sys.argv[1]))))
