"""Instructions of the core's loops for 8192 elements, counted by callgrind, compared with instructions.json. make counts; docs/exact.md."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from echelon import native
from tests.exact import check, machine
from tests.exact.book import Book, Values
from tests.exact.launch import HERE
from tests.exact.loops import COUNTS

FILE = HERE / "instructions.json"
LIMIT_S = 300.0
COST = re.compile(r"[\d+*-]")


def find() -> Values:
    """By set of instructions, of every loop: how many are executed in the core for another 8192 elements."""
    core = native.core()
    if core is None:
        raise SystemExit("these are the loops of the compiled core: make native")
    with tempfile.TemporaryDirectory(prefix="echelon-loops-") as name:
        folder = Path(name)
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/%p", sys.executable, "-I", "-S",
                   str(HERE / "loops.py"), core.__file__, str(folder / "said")]  # fmt: skip
        env = os.environ | {"PYTHONHASHSEED": "0"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            raise SystemExit(f"{done.stderr[-3000:]}\nvalgrind ended with code {done.returncode}")
        found: dict[str, dict[str, int]] = {}
        for pid, (instructions, loop, count) in json.loads((folder / "said").read_text()).items():
            of_set, sign = found.setdefault(instructions, {}), 1 if count == COUNTS[1] else -1
            said = (folder / pid).read_text()
            of_set[loop] = of_set.get(loop, 0) + sign * executed(said, Path(core.__file__).name)
        return found


def executed(said: str, file: str) -> int:
    """Instructions in this file's code, of what callgrind wrote. What they call elsewhere (memcpy, fma of libm) is not in it: that
    is another one on every machine."""
    known = re.search(rf"ob=\((\d+)\) \S*{re.escape(file)}$", said, re.MULTILINE)
    if known is None:
        return 0
    own = [part for part in said.split("\nob=")[1:] if part.startswith(f"({known[1]})")]
    total, called = 0, False
    for line in itertools.chain.from_iterable(part.splitlines() for part in own):
        if line.startswith("calls="):
            called = True  # the next line is what the called function took
        elif COST.match(line):
            total += int(line.split()[1]) if not called else 0
            called = False
    return total


def main(words: list[str]) -> int:
    if shutil.which("valgrind") is None:
        print("instructions of the core's loops are left out: valgrind is not here (apt install valgrind)")
        return 0
    return check.main(Book(FILE), machine.of_instructions(), find, "tests.exact.instructions", words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
