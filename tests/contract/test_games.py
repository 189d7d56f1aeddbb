"""Random operations in shared memory with kills and cancels, in processes of their own: see games.py."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("games.py")


@pytest.mark.needs("core")
@pytest.mark.case("random operations, kills and cancels")
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("operations", [900, pytest.param(100_000, marks=pytest.mark.slow)])
def test_every_operation_is_right_or_cleanly_lost(operations):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), str(operations), str(seed)],
        capture_output=True,
        text=True,
        timeout=3900,
    )
    print(ended.stdout)
    assert ended.returncode == 0, ended.stderr[-3000:]
