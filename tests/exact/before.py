"""Values of the last commit that changed a file of values, found on this machine: that commit, in a temporary worktree."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.exact.book import Values
from tests.exact.launch import ROOT

CORE = "echelon/native"


def last_commit(file: Path) -> str | None:
    """The last one that changed this file, as far as this clone knows."""
    done = _git("log", "-1", "--format=%H", "--", str(file.relative_to(ROOT)), check=False)
    return done.stdout.strip() or None


def values(module: str, commit: str) -> Values:
    """What `python -m MODULE --values FILE` of that commit finds here."""
    with _worktree(commit) as tree, tempfile.TemporaryDirectory() as folder:
        _bring_core(commit, tree)
        out = Path(folder, "values.json")
        command = [sys.executable, "-m", module, "--values", str(out)]
        done = subprocess.run(command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)})
        if done.returncode:
            raise SystemExit(
                f"{module} of commit {commit[:10]} ended with code {done.returncode} on this machine"
            )
        return json.loads(out.read_text())


@contextmanager
def _worktree(commit: str) -> Iterator[Path]:
    """It goes whatever happens, a SIGTERM as well."""
    ended = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="echelon-before-") as folder:
        tree = Path(folder, "tree")
        _git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))
            signal.signal(signal.SIGTERM, ended)


def _bring_core(commit: str, tree: Path) -> None:
    """The compiled core of this tree where its source is that commit's, else that commit's, built."""
    if _git("diff", "--quiet", commit, "--", "csrc", check=False).returncode == 0:
        for core in (ROOT / CORE).glob("_core*.so"):
            shutil.copy(core, tree / CORE)
        return
    print(f"csrc changed since: builds the core of {commit[:10]}", flush=True)
    scripts = Path(sys.executable).parent
    env = os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    build = tree / "build" / "native"
    python = f"-DPython_EXECUTABLE={sys.executable}"
    for command in (
        ["cmake", "-S", "csrc", "-B", str(build), "-G", "Ninja", python],
        ["cmake", "--build", str(build)],
    ):
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(
                f"the core of {commit[:10]} did not build:\n{(done.stdout + done.stderr)[-2000:]}"
            )
    for core in build.glob("_core*.so"):
        shutil.copy(core, tree / CORE)


def _git(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if check and done.returncode:
        raise SystemExit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done
