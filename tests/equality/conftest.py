"""Launches that many tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class Launched:
    code: int
    err: str


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """launch(script, *args, workers=2, options=(), timeout_s=170) -> Launched. One worker is started by plain python, unless `always`."""

    def run(
        script: Path,
        *args: str,
        workers: int = 2,
        options: tuple[str, ...] = (),
        timeout_s: float = 170.0,
        always: bool = False,
    ) -> Launched:
        folder = tmp_path_factory.mktemp("launch")
        command = [sys.executable, str(script), *args]
        if workers > 1 or always:
            command = [
                sys.executable,
                "-m",
                "echelon",
                "run",
                "--workers",
                str(workers),
                *options,
                str(script),
                *args,
            ]
        env = {k: v for k, v in os.environ.items() if not k.startswith("ECHELON_")} | {
            "ECHELON_RUNS": str(folder)
        }
        try:
            done = subprocess.run(
                command, env=env, cwd=folder, capture_output=True, text=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired as over:  # told once to each test that shares this launch
            return Launched(124, f"{over}\n{over.stderr!r}")
        return Launched(done.returncode, done.stdout + done.stderr)

    return run
