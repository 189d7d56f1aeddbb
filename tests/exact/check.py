"""What the programs of exact values have in common: find the values, compare them, or write them anew."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from tests.exact import before
from tests.exact.book import Book, Values, differences, leaves
from tests.exact.machine import Kind, shown


def main(book: Book, kind: Kind, find: Callable[[], Values], module: str, words: list[str]) -> int:
    """Compares what `find` finds with the file; returns the exit code. --write writes it; --values FILE writes it there and no more."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument(
        "--write", action="store_true", help="write the values of this kind of machine into the file"
    )
    parser.add_argument("--values", type=Path, help="write the values into this file, and compare nothing")
    asked = parser.parse_args(words)
    if asked.values:
        asked.values.write_text(json.dumps(find()))
        return 0
    print(f"{book.path.name} on {shown(kind)}", flush=True)
    found, known = find(), book.of(kind)
    if known is None:
        known = _before(book, module, asked.write)
    changes = differences(known, found)
    for line in changes if known else []:
        print(f"  {line}")
    if asked.write:
        _write(book, kind, found, bool(changes))
    elif changes:
        print(
            f"{len(changes)} of {sum(1 for _ in leaves(found))} values differ. If that is meant: make … ARGS=--write, and the commit "
            "says which changed and why."
        )
    else:
        print(f"all {sum(1 for _ in leaves(found))} values are as they were")
    return 0 if asked.write or not changes else 1


def _before(book: Book, module: str, writes: bool) -> Values:
    """What the code of the last commit that changed the file gives on this kind of machine, which the file does not know."""
    commit = before.last_commit(book.path)
    if commit is None and writes:
        return {}
    if commit is None:
        raise SystemExit(
            f"{book.path.name} has no values of this kind of machine, and no commit is known that changed it.\n"
            "A clone with its history is needed (git fetch --unshallow); or begin here: make … ARGS=--write."
        )
    print(
        f"The file has no values of this kind of machine. They are found here and now, by the code of commit {commit[:10]},\n"
        "the last one that changed the file:",
        flush=True,
    )
    return before.values(module, commit)


def _write(book: Book, kind: Kind, found: Values, changed: bool) -> None:
    """Values of other kinds of machines are out of date where something changed here."""
    dropped = [entry["kind"] for entry in book.machines if changed and entry["kind"] != kind]
    book.put(kind, found, others=not changed)
    print(f"{book.path.name} is written")
    for other in dropped:
        print(f"  the values of {shown(other)} are out of date, and gone")
