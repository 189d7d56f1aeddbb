"""Launches that many tests share."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.once import Once

HERE = Path(__file__).parent


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


@dataclass(frozen=True)
class Said:
    """What a launch wrote: its folder, and each rank's file."""

    out: Path
    ranks: list[Any]


@pytest.fixture(scope="session")
def launched_once(once: Once, launch) -> Callable[..., Said]:
    """launched_once(script, *args, workers=2, …) -> Said. A script of this folder is launched once by all test processes, as `script OUT *args`."""

    @functools.cache
    def said(script: str, *args: str, workers: int = 2, **options: Any) -> Said:
        def make(folder: Path) -> None:
            done = launch(HERE / script, str(folder), *args, workers=workers, **options)
            assert done.code == 0, done.err[-4000:]

        out = once(f"{script} {args} {workers} {sorted(options.items())}", make)
        found = [torch.load(out / f"rank-{rank}.pt", weights_only=False) for rank in range(workers)]
        gc.freeze()  # what stays to the end is not looked through by each collection
        return Said(out, found)

    return said
