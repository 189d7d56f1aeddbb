"""The documentation keeps up: every field, every call, every module, every link, and the README's example runs."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)
"""[words](target), and the line [name]: target."""


def _class(path: str, name: str) -> ast.ClassDef:
    tree = ast.parse((ROOT / path).read_text())
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _fields() -> dict[str, str]:
    """Each field of Strategy with the sentence under it."""
    body = _class("echelon/strategy.py", "Strategy").body
    return {
        field.target.id: sentence.value.value
        for field, sentence in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(sentence, ast.Expr)
        and isinstance(sentence.value, ast.Constant)
    }


def _calls() -> list[str]:
    methods = [n for n in _class("echelon/run.py", "Run").body if isinstance(n, ast.FunctionDef)]
    return [method.name for method in methods if not method.name.startswith("_")]


def test_every_field_of_a_strategy_stands_in_the_table_with_its_sentence():
    page = (ROOT / "docs/strategies.md").read_text()
    missing = {
        name: sentence
        for name, sentence in _fields().items()
        if not re.search(rf"^\| `{name}` \|.*\| {re.escape(sentence)} \|", page, re.MULTILINE)
    }
    assert missing == {}


def test_the_table_of_strategies_has_no_field_that_is_gone():
    page = (ROOT / "docs/strategies.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(_fields())


def test_every_call_of_a_run_is_described():
    page = (ROOT / "docs/python-api.md").read_text()
    assert [name for name in _calls() if not re.search(rf"`(with )?run\.{name}\b", page)] == []


def test_every_call_that_is_described_exists():
    page = (ROOT / "docs/python-api.md").read_text().partition("## Not there yet")[0]
    assert set(re.findall(r"`(?:with )?run\.(\w+)", page)) - set(_calls()) == set()


def test_every_module_stands_on_the_map():
    page = (ROOT / "docs/map.md").read_text()
    modules = [path for path in (ROOT / "echelon").rglob("*.py") if path.name != "__init__.py"]
    assert [str(p.relative_to(ROOT)) for p in modules if not re.search(rf"\b{p.name}\b", page)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    dead = []
    for target in map("".join, LINK.findall(_without_code(page.read_text()))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            dead.append(target)
    assert dead == []


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get: lower case, punctuation dropped, blanks as dashes."""
    titles = re.findall(r"^#+ (.*)$", _without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_decision_is_on_the_first_page():
    index = (ROOT / "docs/index.md").read_text()
    assert [
        p.name for p in (ROOT / "docs/decisions").glob("*.md") if f"decisions/{p.name}" not in index
    ] == []


def test_the_readmes_example_has_15_lines_and_runs(tmp_path):
    example = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert example is not None
    assert sum(1 for line in example[1].splitlines() if line.strip()) <= 15
    (tmp_path / "train.py").write_text(example[1])
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.safetensors").exists()
    assert "same answer as one process" in done.stderr


def test_the_first_page_has_150_lines_and_begins_with_the_diff_the_command_and_what_it_prints():
    lines = (ROOT / "README.md").read_text().splitlines()
    start = "\n".join(lines[:40])
    found = [
        word
        for word in ("```diff", "+import echelon", "$ pip install", "$ echelon run", "same answer")
        if word in start
    ]
    assert (len(lines) <= 150, max(map(len, lines)) <= 80, len(found), start.count("```")) == (
        True,
        True,
        5,
        4,
    )


@pytest.mark.parametrize("side", ["-", "+"])
def test_the_readmes_diff_runs_before_and_after_its_lines_are_changed(tmp_path, side):
    diff = re.search(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert diff is not None
    script = "\n".join(line[1:] for line in diff[1].splitlines() if line[:1] in (" ", side))
    (tmp_path / "train.py").write_text(script.replace("20_000", "200"))
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, (tmp_path / "model.pt").exists()) == (0, True), done.stderr
