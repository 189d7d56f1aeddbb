"""Starts the workers of `echelon bench comm` as a run of its own, and brings back what they measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from echelon.bench.comm import Cell
from echelon.errors import EchelonError


class BenchError(EchelonError):
    """The run that measures failed; its own words are on the terminal."""


def about() -> dict[str, Any]:
    """The machine, for the file that a measurement leaves."""
    cpu = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.machine())  # fmt: skip
    now = f"{datetime.now():%Y-%m-%d %H:%M}"
    return {
        "date": now,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }


def measure(asked: dict[str, Any], workers: int, options: list[str]) -> list[Cell]:
    """Blocks until the run is over. Its progress goes to this terminal's stderr when somebody watches there."""
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        out = Path(folder, "cells.json")
        command = [sys.executable, "-m", "echelon", "run", "--workers", str(workers), "--run-dir", f"{folder}/run", *options,
                   "-m", "echelon.bench.comm_worker", json.dumps(asked), str(out)]  # fmt: skip
        watched = sys.stderr.isatty() or "--hosts" in options
        ended = subprocess.run(
            command, stderr=None if watched else subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        if ended.returncode != 0 or not out.exists():
            if ended.stderr:
                sys.stderr.buffer.write(ended.stderr)
            raise BenchError(
                f"the run that measures ended with code {ended.returncode}",
                remedy="Its last lines above say why; --backends gloo leaves the compiled core out.",
            )
        return [Cell(**row) for row in json.loads(out.read_text())]
