"""What a machine lacks is said once, at the top of the run, and nothing else is skipped."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs
from tests.conftest import ROOT

SKIPS = ("skip", "skipif", "importorskip", "SkipTest", "skipTest")
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def skips(source: str) -> list[int]:
    """Lines in which something is skipped by a word of pytest's or unittest's."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in SKIPS:
            if node.attr == "skipTest" or ast.unparse(node.value).split(".")[-1] in (
                "pytest",
                "mark",
                "unittest",
            ):
                found.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module in ("pytest", "unittest"):
            found += [node.lineno for alias in node.names if alias.name in SKIPS]
    return found


def test_only_one_file_skips():
    assert [str(path.relative_to(ROOT)) for path in TESTS if skips(path.read_text())] == ["tests/needs.py"]


@pytest.mark.parametrize(
    "source",
    [
        "pytest.skip('no')", "pytest.importorskip('s3fs')", "@pytest.mark.skipif(True, reason='')\ndef test(): pass",
        "pytestmark = pytest.mark.skip", "from pytest import skip", "raise unittest.SkipTest", "self.skipTest('no')",
        "x = pytest.param(1, marks=[pytest.mark.skip])",
    ],
)  # fmt: skip
def test_a_skip_would_be_found(source):
    assert len(skips(source)) == 1


def test_what_is_called_so_and_is_no_skip_stays():
    assert skips("parse('nonfinite=skip'); said.skip; Net(skip=True); self.skip; form.pytest.skips") == []


def test_every_group_stands_in_the_page_with_what_brings_it():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", page, re.MULTILINE))
    assert rows == {name: need.command for name, need in needs.NEEDS.items()}


FAR = """
from tests import needs
needs.NEEDS = {"moon": needs.Need("the moon", lambda: "it is far", "wait"), "sun": needs.Need("the sun", str, "look up")}
def pytest_configure(config):
    config.pluginmanager.register(needs.LeftOut())
"""

ABOUT = """
import pytest
from tests import needs

@pytest.fixture
def moon():
    needs.use("moon")

@pytest.fixture
def sun():
    needs.use("sun")

@pytest.mark.parametrize("n", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.needs("moon", "sun")
def test_both(n, moon): assert False
@pytest.mark.needs("sun")
def test_sun(sun): pass
def test_neither(): pass
"""


def run(folder: Path, *options: str, tests: str = ABOUT) -> list[str]:
    """What pytest prints where there is a sun and no moon."""
    (folder / "conftest.py").write_text(FAR)
    (folder / "test_far.py").write_text(tests)
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = -q -rs\nmarkers =\n  slow: long\n  needs(group): things\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_the_top_of_the_run_says_what_is_left_out_and_what_brings_it(tmp_path, processes):
    said = run(tmp_path, "-m", "not slow", *processes)
    told = "left out: 2 tests for want of the moon: it is far. To have them: wait"
    assert [number for number, line in enumerate(said) if line == told] == [1 if processes else 0]
    assert sum("SKIPPED" in line and "for want of the moon: it is far" in line for line in said) == 1
    assert re.sub(r" in .*", "", said[-1]) == (
        "2 passed, 2 skipped" if processes else "2 passed, 2 skipped, 1 deselected"
    )


def test_where_nothing_is_missing_nothing_is_said(tmp_path):
    assert "left out" not in "".join(run(tmp_path, "-k", "not both"))


def test_a_test_that_takes_what_it_does_not_declare_is_told_the_mark(tmp_path):
    said = run(tmp_path, tests=ABOUT.replace('@pytest.mark.needs("sun")', ""))
    assert 'mark the test with @pytest.mark.needs("sun")' in "".join(said)
    assert said[-1].startswith("1 passed, 3 skipped, 1 error")


def test_a_group_that_nobody_knows_is_refused(tmp_path):
    said = run(tmp_path, tests='import pytest\n@pytest.mark.needs("mars")\ndef test(): pass')
    assert "needs ['mars']: tests/needs.py has ['moon', 'sun']" in "".join(said)
