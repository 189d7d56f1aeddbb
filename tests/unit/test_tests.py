"""What tests may know of a run: its public face. Whatever is inside is asked of tests/runs.py, so that the inside can be built anew."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import dealing

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
KNOWS = ("runs.py", "unit/test_tests.py")
"""tests/runs.py, and this file, which names what it forbids."""

MIDDLE = (
    "run", "build", "step", "loop", "prepared", "away", "apart", "judging", "replay", "rejoin", "closures", "sharding", "piped",
    "staging", "vertical", "placing", "whole", "owed", "sources", "keeping", "expected", "tally", "start", "prepare.optimizer",
    "parallel.allreduce", "parallel.pushpull", "parallel.first", "parallel.stale", "parallel.rounds", "parallel.gradsync",
    "parallel.wire", "parallel.coded", "parallel.word", "parallel.arriving", "parallel.backward", "parallel.average",
    "parallel.sharded.sync", "parallel.sharded.parted", "parallel.sharded.carry", "parallel.sharded.telling",
)  # fmt: skip
"""Modules that join the rooms of the package to a run: no test imports them."""

INSIDE = (
    "machine", "prepared", "keeping", "trail", "rejoin", "tally", "first_step", "log_book", "normaliser", "norms", "exchange",
    "syncs", "sync", "side_losses", "in_iteration", "stop_wanted", "placed_buffers", "shadow", "saver",
    "_feed", "_echelon", "_inner_step", "_sync",
)  # fmt: skip
"""Attributes of what is inside a run, whoever holds it."""

HELD = ("run", "first", "again", r"\w+_run")
"""What tests call a run."""

OWN = {
    "unit/test_arriving.py": ("parallel.arriving",),
    "unit/test_split_sums.py": ("parallel.average", "shadow"),
}
"""The test of a room that is one of them."""


def of_a_run() -> set[str]:
    """What a Run has, and the page about it does not: most of it under names that others have as well."""
    tree = ast.parse((ROOT / "echelon/run.py").read_text())
    face = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Run")
    names = {node.name for node in face.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(face):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return names - set(re.findall(r"`(?:with )?run\.(\w+)", (ROOT / "docs/python-api.md").read_text()))


RULES = {
    "builds a Run by hand": r"(?<![\w.])Run\(",
    "imports the middle": rf"(?:from|import) echelon\.(?P<found>{'|'.join(map(re.escape, MIDDLE))})(?![\w.])",
    "imports from the middle": r"from echelon(?P<package>(?:\.\w+)*) import (?P<names>\([^)]*\)|[^\n;#]*)",
    "reaches inside": rf"(?<=[\w)\]])\.(?P<found>{'|'.join(INSIDE)})\b(?! import)",
    "reaches into a run": rf"\b(?:{'|'.join(HELD)})\.(?P<found>{'|'.join(sorted(of_a_run()))})\b(?! import|\(\))",
}
"""Searched in the text of every file, so that scripts which stand in strings are seen as well."""


def found_in(name: str, text: str) -> Iterator[str]:
    """`tests/name:line: what is wrong: the words`, for each place."""
    for what, pattern in RULES.items():
        for match in re.finditer(pattern, text):
            groups = match.groupdict()
            if "names" in groups:
                given = re.findall(r"(\w+)(?: as \w+)?", groups["names"])
                found = {f"{groups['package']}.{one}".lstrip(".") for one in given} & set(MIDDLE)
            else:
                found = {groups.get("found", "Run")}
            if found - set(OWN.get(name, ())):
                line = text.count("\n", 0, match.start()) + 1
                yield f"tests/{name}:{line}: {what}: {text.splitlines()[line - 1].strip()}"


def test_what_is_named_here_is_there():
    gone = [
        name for name in MIDDLE if not (ROOT / "echelon" / name.replace(".", "/")).with_suffix(".py").exists()
    ]
    assert gone == []


def test_tests_know_the_public_face_of_a_run_and_tests_runs_knows_the_rest():
    files = {path.relative_to(TESTS).as_posix(): path.read_text() for path in sorted(TESTS.rglob("*.py"))}
    wrong = [place for name, text in files.items() if name not in KNOWS for place in found_in(name, text)]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("run = Run(first.rank, strategy)", "builds a Run by hand"),
        ("from echelon.run import Run as R", "imports the middle"),
        ("import echelon.parallel.allreduce", "imports the middle"),
        ('SCRIPT = """\n    from echelon import build, faults\n"""', "imports from the middle"),
        ("from echelon import (\n    faults,\n    owed as debts,\n)", "imports from the middle"),
        ("from echelon.parallel import arriving", "imports from the middle"),
        ("print(x.machine.counters)", "reaches inside"),
        ("ids = loader._feed.ledger", "reaches inside"),
        ("calm_run.world.close()", "reaches into a run"),
        ('SCRIPT = "first.emit(event)"', "reaches into a run"),
        ("import echelon; from echelon import faults; run = echelon.init(); run.save('x'); first.rank", ""),
        ("from echelon.parallel.pipeline.plan import Plans\nself.world.close()\nhost.runs.wire", ""),
    ],
)
def test_whoever_reaches_inside_is_found_in_scripts_within_strings_too(text, what):
    assert [place.split(": ")[1] for place in found_in("unit/test_new.py", text)] == ([what] if what else [])


def test_what_is_dealt_first_is_there():
    """A name that nothing has any more orders nothing."""
    for name in dealing.LONGEST:
        path, _, test = name.partition("::")
        text = (ROOT / path).read_text()
        assert not test or f"def {test}(" in text, name
