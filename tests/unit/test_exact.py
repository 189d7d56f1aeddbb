"""What compares golden hashes and exact counts, and that their files know every cell, form and loop."""

from __future__ import annotations

import ast
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

from tests.exact import before, check, counts, forms, golden, instructions, loops, steps
from tests.exact.book import Book, differences
from tests.exact.cells import LAUNCHES, SCRIPTS
from tests.exact.fingerprint import fingerprint

ROOT = Path(__file__).parents[2]
BOOKS = [Book(module.FILE) for module in (golden, counts, instructions)]

# what was expected, what was found, and what is said of it
COMPARED = [
    ({}, {}, []),
    ({"a": {"b": 1, "c": "x"}}, {"a": {"c": "x", "b": 1}}, []),
    ({"a": {"b": 1}}, {"a": {"b": 3}}, ["a · b: rose from 1 to 3"]),
    ({"a": {"b": 2.5}}, {"a": {"b": 2}}, ["a · b: fell from 2.5 to 2"]),
    ({"cell": {"weights": "0f"}}, {"cell": {"weights": "10"}}, ["cell · weights: 10 instead of 0f"]),
    ({"a": 1, "b": 1}, {"b": 1, "c": 1}, ["a: is gone (was 1)", "c: is new (1)"]),
    ({"a": {"b": 0}}, {"a": {}}, ["a · b: is gone (was 0)"]),
]


@pytest.mark.parametrize(("expected", "found", "said"), COMPARED)
def test_what_differs_is_named(expected, found, said):
    assert differences(expected, found) == said


def test_every_cell_has_a_value_on_every_machine():
    cells = {name: {cell.name for cell in launch.cells} for name, launch in LAUNCHES.items()}
    cells |= {name: {script.name} for name, script in SCRIPTS.items()}
    for machine in BOOKS[0].machines:
        assert {name: set(found) for name, found in machine["values"].items()} == cells


def test_no_two_cells_of_a_launch_have_one_name():
    for launch in LAUNCHES.values():
        assert len({cell.name for cell in launch.cells}) == len(launch.cells)


def test_every_form_and_worker_has_counts_on_every_machine():
    workers = {name: {f"worker {r}" for r in range(form.workers)} for name, form in forms.FORMS.items()}
    for machine in BOOKS[1].machines:
        assert {name: set(found) for name, found in machine["values"].items()} == workers


def test_every_loop_has_a_count_on_every_machine():
    for machine in BOOKS[2].machines:
        for found in machine["values"].values():
            assert set(found) == set(loops.loops(None))


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.path.name)
def test_no_file_is_without_values_or_knows_a_machine_twice(book):
    kinds = [machine["kind"] for machine in book.machines]
    assert kinds
    assert [kind for kind, other in itertools.combinations(kinds, 2) if kind == other] == []


def test_any_bit_type_shape_and_name_is_seen_and_the_order_of_names_is_not():
    x = torch.tensor([0.0, 1.0])
    states = [
        {"x": x},
        {"x": torch.tensor([-0.0, 1.0])},
        {"x": torch.nextafter(x, x + 1)},
        {"x": x.double()},
        {"x": x.view(2, 1)},
        {"y": x},
        {"x": [0.0, 1.0]},
        {"x": x, "y": None},
    ]
    assert len({fingerprint(state) for state in states}) == len(states)
    assert fingerprint({"a": x, "b": 1}) == fingerprint({"b": 1, "a": x.clone()})


def test_values_of_other_machines_stay_only_if_nothing_changed(tmp_path):
    path = tmp_path / "book.json"
    path.write_text(json.dumps({"about": ["what it is"]}))
    for kind, value, others in (("one", 1, False), ("two", 1, True), ("two", 2, False)):
        Book(path).put({"cpu": kind}, {"cell": value}, others)
        if value == 1:
            assert Book(path).of({"cpu": "one"}) == {"cell": 1}
    held = json.loads(path.read_text())
    assert held == {"about": ["what it is"], "machines": [{"kind": {"cpu": "two"}, "values": {"cell": 2}}]}


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """asked(kind, found, words) -> exit code; the last commit's code finds {"cell": 1}, and the file knows that of machine `one`."""
    path = tmp_path / "book.json"
    path.write_text(json.dumps({"about": [], "machines": [{"kind": {"cpu": "one"}, "values": {"cell": 1}}]}))
    monkeypatch.setattr(before, "last_commit", lambda file: "abcdef0123456789")
    monkeypatch.setattr(before, "values", lambda module, commit: {"cell": 1})
    return lambda kind, found, *words: check.main(
        Book(path), {"cpu": kind}, lambda: {"cell": found}, "module", [*words]
    )


def test_a_known_machine_is_compared_with_the_file(asked, capsys):
    assert (asked("one", 1), asked("one", 2)) == (0, 1)
    assert "cell: rose from 1 to 2" in capsys.readouterr().out


def test_an_unknown_machine_is_compared_with_the_last_commit_that_changed_the_file(asked, capsys):
    assert (asked("two", 1), asked("two", 2)) == (0, 1)
    assert "by the code of commit abcdef0123" in capsys.readouterr().out


def test_writing_a_change_drops_the_values_of_other_machines_and_says_so(asked, capsys):
    assert (asked("two", 1, "--write"), asked("one", 1), asked("two", 1)) == (0, 0, 0)
    assert "gone" not in capsys.readouterr().out
    assert asked("two", 5, "--write") == 0
    assert "the values of one are out of date, and gone" in capsys.readouterr().out


def test_a_step_is_what_was_added_and_steps_that_differ_are_refused_by_name():
    seen = [{"calls": {"a": n, "b": 7}, "bytes": {"x": 10 * n}} for n in (1, 3, 5)]
    found = [counts.less(after, first) for first, after in itertools.pairwise(seen)]
    assert found[0] == {"calls": {"a": 2}, "bytes": {"x": 20}}
    assert counts.steady(found, "a form") == found[0]
    with pytest.raises(SystemExit, match="calls · a: rose from 2 to 3"):
        counts.steady([*found, {"calls": {"a": 3}, "bytes": {"x": 20}}], "a form")


def test_what_the_core_calls_elsewhere_is_not_counted_as_its_own():
    said = "\n".join([
        "events: Ir", "", "ob=(1) /usr/lib/libc.so.6", "fn=(1) memcpy", "3 1000",
        "ob=(2) /here/_core.so", "fn=(2) 0x1", "0 10", "+4 5", "cob=(1)", "cfn=(1)", "calls=2 0", "* 700", "* 1",
        "ob=(1)", "fn=(3)", "1 300", "ob=(2)", "fn=(4)", "0 4", "",
    ])  # fmt: skip
    assert instructions.executed(said, "_core.so") == 10 + 5 + 1 + 4
    assert instructions.executed(said, "other.so") == 0


def test_what_is_left_out_of_the_counts_still_exists():
    known = set()
    for path in (ROOT / "echelon").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                known |= {
                    f"{path.name} {node.name}.{f.name}" for f in node.body if isinstance(f, ast.FunctionDef)
                }
    assert [
        name for name in steps.LEFT_OUT if not name.startswith("threading.py") and name not in known
    ] == []


def test_calls_below_what_is_left_out_are_not_counted(monkeypatch):
    def inner():
        return 1

    def polls():
        return inner() + inner()

    def step():
        return polls() + inner()

    monkeypatch.setitem(steps.LEFT_OUT, f"{Path(__file__).name} {polls.__qualname__}", "polls")
    calls = steps.Calls()
    sys.setprofile(calls)
    step()
    sys.setprofile(None)
    assert {c.co_name: n for c, n in calls.counts.items()} == {"step": 1, "polls": 1, "inner": 1}
