"""Which test process runs what: half of them compute first, the others first take tests that mostly wait; the longest come first.

A unit is dealt as a whole: a test function with all its cases, or a file of unit tests. What several units need is made once
for all processes (tests/once.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

WAITING = ("tests/flows/",)
"""Here tests start processes and wait for them, or for a limit to pass."""

WHOLE = ("tests/unit/", "tests/test_", "tests/flows/test_install.py")
"""Here a file is a unit."""

LONGEST = (
    "tests/contract/test_games.py::test_every_operation_is_right_or_cleanly_lost",
    "tests/flows/test_storm.py::test_the_weights_are_those_of_the_undisturbed_run",
    "tests/flows/test_gan.py::test_random_kills_of_workers_and_servers",
    "tests/equality/test_sharded.py::test_the_matrix",
    "tests/equality/test_divided.py::test_a_model_in_stages_has_the_weights_of_one_process",
    "tests/equality/test_equality.py::test_features",
    "tests/equality/test_equality.py::test_the_matrix",
    "tests/equality/test_served.py::test_the_matrix_with_servers",
    "tests/equality/test_copied.py::test_copies_meet_as_in_a_simulation_in_plain_torch",
    "tests/equality/test_resume.py::test_stopped_and_resumed_gives_the_same_bits",
    "tests/equality/test_shared.py::test_shared_layers_end_with_the_weights_of_one_process",
    "tests/equality/test_parted.py::test_stages_in_parts_lose_steps_evaluate_and_save_as_one_process",
    "tests/contract/test_group.py::test_threads",
    "tests/unit/test_explain.py",
    "tests/flows/test_keeping.py::test_kill_9_at_random_moments_and_resume_gives_the_same_bits_and_every_sample_once",
    "tests/flows/test_checkpoint_s3.py::test_a_server_killed_in_mid_write_fails_the_checkpoint_and_the_old_one_loads",
    "tests/flows/test_ps_wire.py::test_a_client_killed_in_mid_call_leaves_nothing_in_the_server",
    "tests/flows/test_keeping.py::test_sigterm_to_any_process_ends_with_75_and_the_resumed_run_has_the_same_bits",
)


def unit(nodeid: str) -> str:
    """What this test is dealt with."""
    path, _, name = nodeid.partition("::")
    return path if path.startswith(WHOLE) else f"{path}::{name.partition('[')[0]}"


def place(nodeid: str) -> int:
    """Where in the order it stands: smaller comes first."""
    name = unit(nodeid)
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


class Dealing(LoadScopeScheduling):  # type: ignore[misc]
    """Units in the order of the collection; each process takes one of its kind while there is one."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        waits = self.nodes.index(node) >= (len(self.nodes) + 1) // 2
        mine = (each for each in self.workqueue if each.startswith(WAITING) == waits)
        self.workqueue.move_to_end(next(mine, next(iter(self.workqueue))), last=False)
        super()._assign_work_unit(node)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", help="K/N: one of N parts of the tests; what the parts gave is added up")


def part(config: pytest.Config) -> tuple[int, int] | None:
    """(k, n) of --part K/N, with 1 <= k <= n."""
    asked = config.getoption("--part")
    if not asked:
        return None
    try:
        k, n = map(int, asked.split("/"))
    except ValueError:
        k, n = 0, 0
    if not 1 <= k <= n:
        raise pytest.UsageError(f"--part {asked}: K/N is wanted, for example 2/8")
    return k, n


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.nodeid))
    if found := part(config):
        k, n = found
        units = {name: number % n for number, name in enumerate(dict.fromkeys(unit(i.nodeid) for i in items))}
        left_out = [item for item in items if units[unit(item.nodeid)] != k - 1]
        items[:] = [item for item in items if units[unit(item.nodeid)] == k - 1]
        config.hook.pytest_deselected(items=left_out)


OUTCOMES = ("passed", "failed", "error", "skipped", "again")
PARTS = Path(__file__).resolve().parents[1] / "build" / "test-all"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Adds what this part gave to what the others gave, each at its last run."""
    found = part(config)
    if found is None or hasattr(config, "workerinput"):
        return
    k, n = found
    PARTS.mkdir(parents=True, exist_ok=True)
    mine = {name: len(terminalreporter.stats.get(name, ())) for name in OUTCOMES}
    (PARTS / f"{k}-of-{n}.json").write_text(json.dumps(mine))
    there = [number for number in range(1, n + 1) if (PARTS / f"{number}-of-{n}.json").exists()]
    every = [json.loads((PARTS / f"{number}-of-{n}.json").read_text()) for number in there]
    added = ", ".join(f"{sum(one[name] for one in every)} {name}" for name in OUTCOMES)
    terminalreporter.write_line(f"parts {', '.join(map(str, there))} of {n} together: {added}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Dealing:
    return Dealing(config, log)
