"""The core's loops, each in a process of its own: loops.py CORE OUT, under callgrind, which leaves a file for each process.

Nothing but the core is imported, so that nobody waits for torch under valgrind. OUT says which process did what.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import mmap
import os
import sys
from pathlib import Path

COUNTS = (8192, 16384)
"""Elements. What a loop takes for the second beyond the first is the loop alone: calls from Python cost the same for both."""

TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}
SUM, AVG, MAX = 0, 1, 3


ROOMS = [mmap.mmap(-1, 8 * COUNTS[-1]) for _ in range(6)]
"""For the most elements of the widest type: zeros, each at a page of its own."""


def loops(core):
    """name -> the loop over so many elements."""
    a, b, c, d, e, f = (ctypes.addressof(ctypes.c_char.from_buffer(room)) for room in ROOMS)

    def step(dtype, n, *parts):
        return (a, a), list(parts or (b,)), n, TYPES[dtype], 1.0, 0.01

    sgd = ((c, c), 0.1, 0.9, 0.0, False, False)
    rmsprop = ((c, c), (d, d), (e, e), 0.1, 0.99, 1e-8, 0.9, True)
    adam = (0.1, 0.9, 0.99, 1e-8, 0.5, 0.99)
    found = {}
    for dtype, code in TYPES.items():
        found[f"fold sum of 2, {dtype}"] = lambda n, t=code: core.fold(a, [a, b], n, t, SUM)
        found[f"fold sum of 4, {dtype}"] = lambda n, t=code: core.fold(a, [a, b, c, d], n, t, SUM)
    found["fold avg of 2, float32"] = lambda n: core.fold(a, [a, b], n, 0, AVG)
    found["fold max of 2, float32"] = lambda n: core.fold(a, [a, b], n, 0, MAX)
    for dtype in ("float32", "float64"):
        code = TYPES[dtype]
        found |= {
            f"sum of 2 into 2, {dtype}": lambda n, t=code: core.sum([a, c], [a, b], n, t),
            f"sgd, {dtype}": lambda n, t=dtype: core.sgd(*step(t, n), *sgd),
            f"sgd of 2 parts, {dtype}": lambda n, t=dtype: core.sgd(*step(t, n, b, f), *sgd),
            f"adagrad, {dtype}": lambda n, t=dtype: core.adagrad(*step(t, n), (c, c), 0.1, 1e-10),
            f"rmsprop, {dtype}": lambda n, t=dtype: core.rmsprop(*step(t, n), *rmsprop),
            f"adam, {dtype}": lambda n, t=dtype: core.adam(*step(t, n), (c, c), (d, d), (0, 0), *adam, False),
            f"amsgrad, {dtype}": lambda n, t=dtype: core.adam(
                *step(t, n), (c, c), (d, d), (e, e), *adam, True
            ),
            f"average, {dtype}": lambda n, t=code: core.average((a, a), b, n, t, 0.1),
            f"squares, {dtype}": lambda n, t=code: core.sum_of_squares(a, n, t),
            f"finite, {dtype}": lambda n, t=code: core.finite(a, n, t),
        }
    return found


def main() -> None:
    spec = importlib.util.spec_from_file_location("_core", sys.argv[1])
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    said = {}
    for instructions in core.isas():
        core.choose(instructions)
        for name, loop in loops(core).items():
            for count in COUNTS:
                pid = os.fork()
                if pid == 0:
                    loop(count)
                    os._exit(0)
                _, status = os.waitpid(pid, 0)
                assert status == 0, f"{name}: {status}"
                said[pid] = [instructions, name, count]
    Path(sys.argv[2]).write_text(json.dumps(said))


if __name__ == "__main__":
    main()
