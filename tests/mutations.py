"""Do the tests notice a mistake? Single-line mistakes are put into a clone of this tree, one at a time, and the tests that run that line are run.

    python -m tests.mutations cover CLONE                      one `make test` there with coverage: which tests run which line, and how much is covered
    python -m tests.mutations try CLONE --seed 1 --number 40   makes the mistakes there; prints each with the test that found it, or that none did
    python -m tests.mutations try CLONE --only 3,17            those of the same seed again, for example with other tests in the clone

The clone has a .venv (make setup) with `pip install coverage`. Tests of `make quick` come first, then the others that run the line,
those that take least first. As a plugin (pytest -p tests.mutations) it tells coverage which test runs.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PLACES = ("echelon/step.py", "echelon/parallel", "echelon/ps", "echelon/data", "echelon/checkpoint")
"""Where mistakes are made: the step, the syncs, servers, data and checkpoints."""

QUICK = ("tests/unit/", "tests/contract/", "tests/equality/test_forms.py")
LIMIT_S, TESTS_AT_MOST = 240.0, 60

CONFIG = """
[run]
branch = True
source = echelon
data_file = {folder}/.coverage
parallel = True
context = ${{PYTEST_CURRENT_TEST-}}
patch = _exit, fork
disable_warnings = module-not-measured, no-data-collected, module-not-imported, couldnt-parse, no-sysmon, no-ctracer
"""

SWAPPED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is", ast.In: "not in",
    ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.BitOr: "&", ast.BitAnd: "|",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mistake:
    path: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {self.before.strip()}  ->  {self.after.strip()}"


def mistakes_in(path: str, text: str) -> Iterator[Mistake]:
    """Every mistake that this file can get."""
    lines, tree = text.splitlines(), ast.parse(text)
    types = {id(part) for hint in _annotations(tree) for part in ast.walk(hint)}
    for node in ast.walk(tree):
        if id(node) in types:
            continue
        for row, start, end, new in _edits(node, lines):
            before = lines[row]
            after = before[:start] + new + before[end:]
            if after != before:
                yield Mistake(path, row + 1, before, after)


def _annotations(tree: ast.AST) -> Iterator[ast.expr]:
    """Types that are written down: nothing runs there."""
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            found = getattr(node, name, None)
            if isinstance(found, ast.expr):
                yield found


def _edits(node: ast.AST, lines: list[str]) -> Iterator[tuple[int, int, int, str]]:
    """(row, from column, to column, text) of what is put there instead; only what stands on one line."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield from _between(node.left, node.comparators[0], SWAPPED.get(type(node.ops[0]), ""))
    elif isinstance(node, ast.BinOp):
        yield from _between(node.left, node.right, SWAPPED.get(type(node.op), ""))
    elif isinstance(node, ast.BoolOp):
        yield from _between(node.values[0], node.values[1], SWAPPED[type(node.op)])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and node.lineno == node.end_lineno:
        yield node.lineno - 1, node.col_offset, node.operand.col_offset, ""
    elif (
        isinstance(node, ast.Constant) and type(node.value) in (bool, int) and node.lineno == node.end_lineno
    ):
        new = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
        yield node.lineno - 1, node.col_offset, int(node.end_col_offset or 0), new
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
        yield node.lineno - 1, node.col_offset, int(node.func.end_col_offset or 0), NAMES[node.func.id]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.lineno == node.end_lineno:
        yield node.lineno - 1, node.col_offset, int(node.end_col_offset or 0), "pass"
    elif isinstance(node, ast.AugAssign) and node.lineno == node.end_lineno:
        yield from _between(node.target, node.value, SWAPPED.get(type(node.op), "") + "=")


def _between(left: ast.expr, right: ast.expr, new: str) -> Iterator[tuple[int, int, int, str]]:
    if new not in ("", "=") and left.end_lineno == right.lineno and left.lineno == left.end_lineno:
        yield left.lineno - 1, int(left.end_col_offset or 0), right.col_offset, f" {new} "


# -- which tests run which line ------------------------------------------------------------------------------------------


def folder_of(clone: Path) -> Path:
    return clone / "build" / "coverage"


def cover(clone: Path, command: list[str]) -> None:
    """Runs the tests of the clone with coverage, and prints how much of lines and branches they run."""
    folder = folder_of(clone)
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "coveragerc"
    config.write_text(CONFIG.format(folder=folder))
    python = str(clone / ".venv" / "bin" / "python")
    env = {**os.environ, "COVERAGE_PROCESS_START": str(config), "COVERAGE_RCFILE": str(config)}
    began = time.monotonic()
    tests = command or ["-m", "not slow", "-n", "4"]
    subprocess.run(
        [python, "-m", "pytest", "-p", "tests.mutations", "--timeout", "900", *tests],
        cwd=clone,
        env=env,
        check=False,
    )
    print(f"tests with coverage: {time.monotonic() - began:.0f} s", flush=True)
    for what in (
        ["combine", "-q"],
        ["report", "--skip-covered", "--format=total"],
        ["json", "-q", "-o", str(folder / "total.json")],
    ):
        subprocess.run([python, "-m", "coverage", *what], cwd=clone, env=env, check=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """As a plugin of pytest: what this process runs now belongs to this test."""
    from coverage import Coverage

    current = Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid)
    return (yield)


def tests_by_line(clone: Path) -> dict[tuple[str, int], set[str]]:
    """Names of tests, by file and line."""
    from coverage import CoverageData

    data = CoverageData(basename=str(folder_of(clone) / ".coverage"))
    data.read()
    found: dict[tuple[str, int], set[str]] = {}
    for file in data.measured_files():
        path = str(Path(file).relative_to(clone))
        for line, contexts in data.contexts_by_lineno(file).items():
            names = {
                re.sub(r" \((setup|call|teardown)\)$", "", context).partition("|")[0] for context in contexts
            }
            found[path, line] = {name for name in names if name.startswith("tests/")}
    return found


# -- mistakes ------------------------------------------------------------------------------------------------------------


def chosen(clone: Path, seed: int, number: int, covered: dict[tuple[str, int], set[str]]) -> list[Mistake]:
    """Of lines that some test runs: one mistake a line, drawn by seed."""
    by_line: dict[tuple[str, int], list[Mistake]] = {}
    for place in PLACES:
        files = [clone / place] if place.endswith(".py") else sorted((clone / place).rglob("*.py"))
        for file in files:
            for mistake in mistakes_in(str(file.relative_to(clone)), file.read_text()):
                if covered.get((mistake.path, mistake.line)):
                    by_line.setdefault((mistake.path, mistake.line), []).append(mistake)
    draw = random.Random(seed)
    return [draw.choice(by_line[at]) for at in draw.sample(sorted(by_line), number)]


def found_by(clone: Path, mistake: Mistake, tests: list[str], cost: dict[str, float]) -> tuple[str, int]:
    """The test that failed with this mistake ("" if none did), and how many were asked."""
    file = clone / mistake.path
    text = file.read_text()
    lines = text.splitlines(keepends=True)
    lines[mistake.line - 1] = mistake.after + "\n"
    file.write_text("".join(lines))
    asked = 0
    try:
        for quick in (True, False):
            part = sorted((t for t in tests if t.startswith(QUICK) == quick), key=lambda t: cost.get(t, 1.0))
            part = part[:TESTS_AT_MOST]
            if part:
                asked += len(part)
                failed = _first_failure(clone, part)
                if failed:
                    return failed, asked
    finally:
        file.write_text(text)
    return "", asked


def _first_failure(clone: Path, tests: list[str]) -> str:
    command = [
        str(clone / ".venv/bin/python"),
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "90",
        *tests,
    ]
    try:
        done = subprocess.run(
            command, cwd=clone, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT_S:.0f} s"
    if done.returncode in (0, 5):
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::\S+)|^_+ (?:ERROR at \w+ of )?(test_\S+)", done.stdout, re.M)
    return next((word for word in failed.groups() if word), "") if failed else f"exit code {done.returncode}"


def costs(folder: Path | None) -> dict[str, float]:
    """Seconds by test, as tests/times.py recorded them."""
    found: dict[str, float] = {}
    for file in folder.glob("*.jsonl") if folder else ():
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            if entry["kind"] == "test":
                found[entry["name"]] = entry["wall_s"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("cover", "try"))
    parser.add_argument("clone", type=Path)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 20))
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--only", default="")
    parser.add_argument("--times", type=Path, help="a folder of ECHELON_TEST_TIMES: cheap tests first")
    parser.add_argument("--command", nargs=argparse.REMAINDER, default=[])
    options = parser.parse_args()
    clone = options.clone.resolve()
    if options.what == "cover":
        cover(clone, options.command)
        return
    covered, cost = tests_by_line(clone), costs(options.times)
    only = {int(word) for word in options.only.split(",") if word}
    print(f"seed {options.seed}", flush=True)
    missed = 0
    for number, mistake in enumerate(chosen(clone, options.seed, options.number, covered), 1):
        if only and number not in only:
            continue
        tests = sorted(covered.get((mistake.path, mistake.line), ()))
        began = time.monotonic()
        by, asked = found_by(clone, mistake, tests, cost)
        missed += not by
        print(f"{number:3} {'found' if by else 'MISSED'} {mistake}", flush=True)
        print(
            f"      {by or 'no test fails'}; {asked} of {len(tests)} tests asked, {time.monotonic() - began:.0f} s",
            flush=True,
        )
    print(f"{missed} missed")


if __name__ == "__main__":
    sys.exit(main())
