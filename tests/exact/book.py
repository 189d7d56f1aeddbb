"""A file of exact values, by the kind of machine they were found on; and what differs between two sets of them: pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.exact.machine import Kind

Values = Mapping[str, Any]
"""Numbers and words in any nesting of dicts."""


def differences(expected: Values, found: Values) -> list[str]:
    """A line for each entry that is not what it was, with its whole name: what rose or fell, what is another, what is new or gone."""
    before, now = dict(leaves(expected)), dict(leaves(found))
    lines = []
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            lines.append(f"{name}: is gone (was {before[name]})")
        elif name not in before:
            lines.append(f"{name}: is new ({now[name]})")
        elif before[name] != now[name]:
            lines.append(f"{name}: {_change(before[name], now[name])}")
    return lines


def leaves(values: Values, above: str = "") -> Iterator[tuple[str, Any]]:
    """(whole name, value) of every entry."""
    for name, value in values.items():
        whole = f"{above} · {name}" if above else name
        if isinstance(value, Mapping):
            yield from leaves(value, whole)
        else:
            yield whole, value


def _change(before: Any, now: Any) -> str:
    if isinstance(before, str) or isinstance(now, str):
        return f"{now} instead of {before}"
    return f"{'rose' if now > before else 'fell'} from {before} to {now}"


class Book:
    """One such file. `about` are lines for whoever opens it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        held = json.loads(path.read_text()) if path.exists() else {}
        self.about: list[str] = held.get("about", [])
        self.machines: list[dict[str, Any]] = held.get("machines", [])

    def of(self, kind: Kind) -> Values | None:
        """What is known of this kind of machine."""
        return next((entry["values"] for entry in self.machines if entry["kind"] == kind), None)

    def put(self, kind: Kind, values: Values, others: bool) -> None:
        """These are this kind's values from now on. The `others` stay only if nothing changed that they would show as well."""
        kept = [entry for entry in self.machines if others and entry["kind"] != kind]
        self.machines = [*kept, {"kind": kind, "values": values}]
        text = json.dumps({"about": self.about, "machines": self.machines}, indent=1, ensure_ascii=False)
        self.path.write_text(text + "\n")
