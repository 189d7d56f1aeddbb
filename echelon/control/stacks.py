"""The Python stack of a process that cannot answer: one that holds the GIL, or a loader process of one that waits.

A worker registers a signal with faulthandler, whose C code writes the stack of the thread that gets it, without the GIL,
into an anonymous file. Whoever may look into /proc/PID/fd finds that file, sends the signal and reads. Forked loader
processes inherit both. The signal is a real-time one that nobody else uses; it is sent only to a process that still catches it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from pathlib import Path

from echelon import dumps
from echelon.clock import Deadline

SIGNAL = signal.SIGRTMIN + 9
NAME = "echelon-stack"
LOOK_S = 0.02

_installed: list[int] = []


def install() -> None:
    """From now on ask() works on this process and on what it forks. Does nothing where the system has no such file."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        fd = os.memfd_create(NAME)
        faulthandler.register(SIGNAL, file=fd, all_threads=False, chain=False)
        _installed.append(fd)


def ask(pid: int, deadline: Deadline) -> list[str]:
    """The present stack of a process of this machine, the innermost frame last, each as "file:line function".

    Blocks until it answers or the deadline passed: [] then, and for a process that did not install() or does not catch the
    signal any more.
    """
    file = _file(pid)
    if file is None or not _catches(pid):
        return []
    pause = threading.Event()
    with contextlib.suppress(OSError), open(file, "rb") as dump:
        before = os.fstat(dump.fileno()).st_size
        os.kill(pid, SIGNAL)
        size = before
        while not deadline.passed:
            pause.wait(min(LOOK_S, deadline.left_s))
            size, last = os.fstat(dump.fileno()).st_size, size
            if size > before and size == last:  # written in small pieces: wait until it rests
                break
        dump.seek(before)
        return read(dump.read().decode("utf-8", "replace"))
    return []


def read(text: str) -> list[str]:
    """The frames of a faulthandler dump."""
    return [f"{file}:{line} {name}" for file, line, name in reversed(dumps.all_of(text))]


def state(pid: int) -> tuple[str, float] | None:
    """A process's state (R, S, D, T, …) and the seconds of CPU it has used, from /proc; None when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _file(pid: int) -> str | None:
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{NAME}"):
                    return f"{folder}/{name}"
    return None


def _catches(pid: int) -> bool:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False
