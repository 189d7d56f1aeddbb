"""torch's own suite for backends (torch/testing/_internal/distributed/distributed_test.py), over gloo and over ours.

    python tests/torch_suite.py --world-size 2 --out results.json            # both, then what differs
    python tests/torch_suite.py --only test_all_reduce_sum --only test_barrier

Wherever gloo passes ours must pass, except for the tests in EXCEPTIONS, each with its reason (docs/torch-backend.md lists
them too). No part of the default tests: it takes about ten minutes a backend. A sample is in tests/flows/test_torch_backend.py.

The suite asks in many places whether the backend is called "gloo" and skips a test if not. So that those run too, it is
loaded with "echelon" put beside "gloo" in these conditions; nothing else of it is changed. Processes are forked, not
spawned: importing torch takes longer than most tests.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import types
import unittest
from collections.abc import Iterator
from pathlib import Path

OURS, THEIRS = "echelon", "gloo"

NOT_BY_NAME = (
    "dist.monitored_barrier refuses every backend that is not called gloo; ours is a method of the group"
)
EXCEPTIONS: dict[str, str] = {
    "test_monitored_barrier_failure_order": NOT_BY_NAME,
    "test_monitored_barrier_gloo": NOT_BY_NAME,
    "test_monitored_barrier_gloo_subgroup": NOT_BY_NAME,
    "test_monitored_barrier_wait_all_ranks": NOT_BY_NAME,
}
"""Test -> why it does not pass over ours though it does over gloo."""


def adapted(source: str) -> str:
    """The suite's source with our name beside gloo's."""
    both = f'("{THEIRS}", "{OURS}")'
    source = source.replace(f'BACKEND != "{THEIRS}"', f"BACKEND not in {both}")
    source = source.replace(f'BACKEND == "{THEIRS}"', f"BACKEND in {both}")
    return source.replace(f'is_available({{"{THEIRS}"}})', f'is_available({{"{THEIRS}", "{OURS}"}})')


def suite_class() -> type[unittest.TestCase]:
    """torch's suite as a TestCase whose ranks are forked. BACKEND and WORLD_SIZE come from the environment."""
    import importlib.util

    import torch.testing._internal.common_distributed as common

    import echelon.torch_backend  # noqa: F401

    for known in common.DistTestCases.backend_feature.values():
        if THEIRS in known:
            known.add(OURS)
    common.DistTestCases.backend_feature["plugin"].add(OURS)
    name = "torch.testing._internal.distributed.distributed_test"
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.origin is not None
    module = types.ModuleType(name)
    module.__file__ = found.origin
    sys.modules[name] = module
    source = adapted(Path(found.origin).read_text())
    exec(compile(source, found.origin, "exec", dont_inherit=True), module.__dict__)

    class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    return Suite


def run_all(out: Path, only: list[str], timeout_s: int) -> None:
    """Runs the tests one by one and writes one line of JSON for each."""
    import torch
    import torch.testing._internal.common_distributed as common

    torch.set_num_threads(1)
    common.TIMEOUT_DEFAULT = timeout_s
    common.TIMEOUT_OVERRIDE.clear()
    cls = suite_class()
    names = only or unittest.TestLoader().getTestCaseNames(cls)
    with out.open("w") as lines:
        for name in names:
            began, result = time.monotonic(), unittest.TestResult()
            cls(name).run(result)
            problems = result.errors + result.failures
            verdict = "failed" if problems else "skipped" if result.skipped else "passed"
            why = problems[0][1] if problems else result.skipped[0][1] if result.skipped else ""
            seconds = round(time.monotonic() - began, 2)
            lines.write(json.dumps({"test": name, "verdict": verdict, "seconds": seconds, "why": why}) + "\n")
            lines.flush()


def over(backend: str, world_size: int, only: list[str], timeout_s: int, log: Path | None) -> dict[str, dict]:
    """The verdicts over one backend, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "barrier").mkdir()
        out = Path(folder) / "verdicts"
        environment = os.environ | {
            "BACKEND": backend, "WORLD_SIZE": str(world_size), "TEMP_DIR": folder, "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo", "INIT_METHOD": f"file://{folder}/meeting",
        }  # fmt: skip
        command = [sys.executable, __file__, "--inside", str(out), "--timeout-s", str(timeout_s)]
        command += [part for name in only for part in ("--only", name)]
        with (log or Path(os.devnull)).open("wb") as said:
            subprocess.run(command, env=environment, stdout=said, stderr=said, check=False)
        return {line["test"]: line for line in map(json.loads, out.read_text().splitlines())}


def differences(theirs: dict[str, dict], ours: dict[str, dict]) -> Iterator[tuple[str, str]]:
    """Tests that pass over gloo and not over ours, with what ours said."""
    for name, verdict in theirs.items():
        got = ours.get(name, {"verdict": "not run", "why": ""})
        if verdict["verdict"] == "passed" and got["verdict"] != "passed":
            last = [line for line in got["why"].splitlines() if line.strip()][-1:] or [""]
            yield name, f"{got['verdict']}: {last[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--only", action="append", default=[], help="a test's name; may be given again")
    parser.add_argument("--out", type=Path, help="all verdicts, as JSON")
    parser.add_argument("--logs", type=Path, help="a folder for what the tests print")
    parser.add_argument("--timeout-s", type=int, default=60, help="of one test")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        run_all(asked.inside, asked.only, asked.timeout_s)
        return 0
    verdicts = {
        backend: over(backend, asked.world_size, asked.only, asked.timeout_s, asked.logs and asked.logs / backend)
        for backend in (THEIRS, OURS)
    }  # fmt: skip
    if asked.out:
        asked.out.write_text(json.dumps(verdicts, indent=1))
    for backend, found in verdicts.items():
        counts = {v: sum(x["verdict"] == v for x in found.values()) for v in ("passed", "skipped", "failed")}
        print(f"{backend}: {len(found)} tests, " + ", ".join(f"{n} {v}" for v, n in counts.items()))
    wrong = 0
    for name, what in differences(verdicts[THEIRS], verdicts[OURS]):
        expected = EXCEPTIONS.get(name)
        wrong += expected is None
        print(f"{'expected' if expected else 'WRONG'} {name}: {expected or what}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
