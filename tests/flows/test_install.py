"""The package as somebody else installs it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

SCRIPT = """
import echelon, torch
run = echelon.init()
assert "site" in echelon.__file__, echelon.__file__
model = run.prepare(torch.nn.Linear(2, 2))
print("world", run.world_size)
"""


@pytest.mark.case("pip install and use from outside the clone")
def test_it_installs_and_works_from_outside_the_clone(tmp_path):
    site = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(site),
        str(ROOT),
    ]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if not k.startswith("ECHELON_")} | {"PYTHONPATH": str(site)}
    run = subprocess.run([str(site / "bin" / "echelon"), "run", "--workers", "2", "train.py"], cwd=tmp_path, env=env,
                         capture_output=True, text=True, timeout=60)  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "world 2" in run.stdout
