"""Every row of the table of cases is claimed by a test."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from tests.cases import ROWS
from tests.long import LONG, PROCESSES

HERE = Path(__file__).parent


@functools.cache
def claimed() -> frozenset[str]:
    """Rows named in `pytest.mark.case("…")` of any test file, and the features."""
    found: set[str] = set()
    for path in HERE.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "case"
            ):
                found |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    tree = ast.parse((HERE / "equality" / "features.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any(
            isinstance(d, ast.Name) and d.id == "feature" for d in node.decorator_list
        ):
            found.add(node.name)
    return frozenset(found)


@pytest.mark.parametrize("row", sorted(ROWS))
def test_the_row_has_a_test(row):
    assert row in claimed(), f"no test claims {row!r}: mark one with @pytest.mark.case({row!r})"


def test_no_test_claims_a_row_that_is_not_in_the_table():
    from tests.equality.features import FEATURES

    assert claimed() - ROWS - set(FEATURES) == set()


def test_what_is_left_out_for_its_time_exists():
    missing = []
    for name in LONG | PROCESSES:
        path, _, test = name.partition("::")
        if f"def {test.partition('[')[0]}(" not in (HERE / path).read_text():
            missing.append(name)
    assert missing == []
