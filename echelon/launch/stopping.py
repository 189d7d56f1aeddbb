"""Ending a run from outside: its supervisor is asked, and waited for."""

from __future__ import annotations

import os
import selectors
import signal
import socket

from echelon.clock import Deadline
from echelon.errors import UsageError, WorldError
from echelon.launch.rundir import RunDir

WAIT_S = 15.0
"""Beyond the time that the run has for its last checkpoint."""


def stop(folder: RunDir) -> str:
    """Asks the supervisor to end the run in good order, waits until it did, and gives a sentence about it."""
    name = folder.name
    supervisor = next((process for process in folder.load_processes() if process.role == "supervisor"), None)
    if supervisor is not None and supervisor.host != socket.gethostname().split(".")[0]:
        raise UsageError(f"run {name} was started on {supervisor.host}", remedy="Run `echelon stop` there.")
    if supervisor is None or not supervisor.alive:
        return f"run {name} is over already"
    watch = os.pidfd_open(supervisor.pid)
    try:
        if not supervisor.alive:  # the pid may be another's since we looked
            return f"run {name} is over already"
        signal.pidfd_send_signal(watch, signal.SIGTERM)
        with selectors.DefaultSelector() as selector:
            selector.register(watch, selectors.EVENT_READ)
            wait_s = float(folder.read().get("grace_s", 0.0)) + WAIT_S
            deadline = Deadline.after(wait_s)
            if not selector.select(deadline.left_s):
                raise WorldError(f"run {name} did not end in {wait_s:g} s",
                                 remedy=f"Its supervisor is pid {supervisor.pid}: kill -9 ends it.")  # fmt: skip
    finally:
        os.close(watch)
    saved = folder.read().get("code") == 75
    return f"run {name} is stopped" + (f", with a checkpoint: go on with --resume {name}" if saved else "")
