"""Processes of tests that need torch but no launcher: forked from one that has imported it, which each test process has.

    process = start(act, *args, log=path, space="h1")     runs `act(*args)`, a function of a module, inside a network namespace
    process.poll(), process.wait(timeout_s), process.kill(), process.pid          as with subprocess.Popen

An import of torch takes a second of processor time. What is forked has one thread for computing.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "tests.contract.group_contract", "echelon.comm.over_native"])


class Process:
    """A process under way."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return int(self._process.pid or 0)

    def poll(self) -> int | None:
        """Its exit code, -n after signal n; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(["a forked process"], timeout_s)
        return code

    def kill(self) -> None:
        self._process.kill()


def start(act: Callable[..., None], *args: Any, log: Path, space: str = "") -> Process:
    """See the module. What it writes to stdout and stderr goes into `log`."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)  # read by the process that forks, when the first one is started
    try:
        process = _context.Process(target=_run, args=(act, args, str(log), space), daemon=True)
        process.start()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return Process(process)


def _run(act: Callable[..., None], args: tuple[Any, ...], log: str, space: str) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for target in (1, 2):
        os.dup2(fd, target)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if space:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{space}") as there:
            if libc.setns(there.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"network namespace {space}")
    act(*args)
