"""Exact counts of a steady step: calls, messages and bytes, compared with counts.json. make counts; docs/exact.md."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from echelon import native
from tests.exact import check, machine
from tests.exact.book import Book, Values, differences
from tests.exact.forms import FORMS, Form
from tests.exact.launch import HERE, launch, options

FILE = HERE / "counts.json"


def find() -> Values:
    """Of every form and worker: what one steady step takes."""
    if native.core() is None:
        raise SystemExit("messages are counted in the compiled core's groups: make native")
    found = {}
    with tempfile.TemporaryDirectory(prefix="echelon-counts-") as folder:
        for name, form in FORMS.items():
            began, place = time.monotonic(), Path(folder, name)
            place.mkdir()
            found[name] = of_form(name, form, place)
            print(f"  {name}: {time.monotonic() - began:.1f} s", flush=True)
    return found


def of_form(name: str, form: Form, place: Path) -> Values:
    launch(options(form.workers, form.servers, form.strategy), "steps.py", [str(place), name], place)
    found = {}
    for rank in range(form.workers):
        who, seen = f"worker {rank}", json.loads((place / f"{rank}.json").read_text())
        step = steady([less(after, before) for before, after in itertools.pairwise(seen)], f"{name}, {who}")
        found[who] = {**step, "calls": step["calls"] if rank == 0 else by_package(step["calls"])}
    return found


def less(after: Values, before: Values) -> dict[str, Any]:
    """What was added between two countings; what stayed is not in it."""
    found: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, dict):
            found[name] = less(value, before.get(name, {}))
        elif value != before.get(name, 0):
            found[name] = value - before.get(name, 0)
    return found


def steady(steps: list[dict[str, Any]], whose: str) -> dict[str, Any]:
    """The step that all of these are; SystemExit with what differs."""
    first, *others = steps
    changes = [line for other in others for line in differences(first, other)]
    if changes:
        raise SystemExit(
            "\n".join([f"{whose}: steps after the warm-up differ", *(f"  {line}" for line in changes)])
        )
    return first


def by_package(calls: dict[str, int]) -> dict[str, int]:
    """Without the modules of Echelon: another worker's are nearly those of the first."""
    found: dict[str, int] = {}
    for place, number in calls.items():
        package = place.partition("/")[0]
        found[package] = found.get(package, 0) + number
    return found


if __name__ == "__main__":
    sys.exit(check.main(Book(FILE), machine.of_calls(), find, "tests.exact.counts", sys.argv[1:]))
