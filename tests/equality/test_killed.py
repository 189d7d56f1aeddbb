"""Same answer while servers are killed: `apply=server` with a copy of each server's state on another one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.equality.test_equality import BOUND, difference, plain

HERE = Path(__file__).parent


@pytest.mark.timeout(600)
@pytest.mark.case("ps: the same answer while servers are killed")
@pytest.mark.parametrize(
    ("workers", "servers", "rounds", "kills"),
    [(2, 2, 1, 1), pytest.param(3, 3, 6, 15, marks=pytest.mark.slow)],
)
def test_the_matrix_while_servers_are_killed(tmp_path, launch, workers, servers, rounds, kills):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    options = ("--servers", str(servers), "--strategy", "ps,apply=server")
    result = launch(
        HERE / "killed.py", str(tmp_path), str(seed), str(rounds), str(kills),
        workers=workers, options=options, always=True, timeout_s=500,
    )  # fmt: skip
    assert result.code == 0, result.err[-4000:]
    for rank in range(workers):
        results, killed = torch.load(tmp_path / f"rank-{rank}.pt")
        assert rank or len(killed) >= kills, killed
        assert len(results) >= 20 * rounds
        for (turn, form, case), weights in results.items():
            assert difference(weights, plain(case)) < BOUND, (turn, form, case)
