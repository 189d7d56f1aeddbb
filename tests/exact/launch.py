"""One launch of a script of this folder, with nothing of the caller's environment that would change what it does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_S = 300.0


def launch(
    options: tuple[str, ...],
    script: str,
    words: list[str],
    place: Path,
    code: int = 0,
    passed_on: tuple[str, ...] = (),
) -> None:
    """`echelon run OPTIONS SCRIPT WORDS` in the folder `place`, or plain python without options; SystemExit with what it said unless it
    ends with `code`. Of Echelon's variables only those `passed_on` count."""
    launcher = ["-m", "echelon", "run", *options] if options else []
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ECHELON_", "OMP_")) or k in passed_on}
    env |= {"PYTHONPATH": str(ROOT), "ECHELON_RUNS": str(place / "runs")}
    command = [sys.executable, *launcher, str(HERE / script), *words]
    done = subprocess.run(command, env=env, cwd=place, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != code:
        said = (done.stdout + done.stderr)[-4000:]
        raise SystemExit(f"{said}\n{script} {' '.join(words)}: code {done.returncode} instead of {code}")


def options(workers: int, servers: int = 0, strategy: str = "") -> tuple[str, ...]:
    """Of `echelon run`."""
    served = ("--servers", str(servers)) if servers else ()
    return ("--workers", str(workers), *served, *(("--strategy", strategy) if strategy else ()))
