"""Where the main thread stands, seen from another thread: file, line and function of each frame.

Read through faulthandler's C code, never through frame objects: to walk along f_back of a thread that runs on crashes
CPython 3.11 now and then (sys._current_frames; docs/log.md), and a look must not kill what it looks at.
"""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
import threading

Frame = tuple[str, int, str]
"""File, line (0 when unknown), function."""

FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)")
MAX_BYTES = 1 << 20

_files: dict[int, int] = {}
"""This process -> its file: a fork must not write into its parent's."""


def main_frames() -> list[Frame]:
    """The main thread's frames, the innermost first; at most 100. From one thread at a time."""
    fd = _file()
    os.lseek(fd, 0, os.SEEK_SET)
    os.ftruncate(fd, 0)
    faulthandler.dump_traceback(fd, all_threads=True)
    text = os.pread(fd, MAX_BYTES, 0).decode("utf-8", "replace")
    return of_thread(text, threading.main_thread().ident or 0)


def of_thread(text: str, ident: int) -> list[Frame]:
    """The frames of one thread in a dump of all."""
    found: list[Frame] = []
    mine = False
    for line in text.splitlines():
        if head := THREAD.match(line):
            mine = int(head[1], 16) == ident
        elif mine and (frame := FRAME.match(line)):
            found.append(as_frame(frame))
    return found


def all_of(text: str) -> list[Frame]:
    """All frames of a dump, the innermost first."""
    return [as_frame(frame) for line in text.splitlines() if (frame := FRAME.match(line))]


def as_frame(match: re.Match[str]) -> Frame:
    return match[1], int(match[2]) if match[2].isdigit() else 0, match[3]


def _file() -> int:
    pid = os.getpid()
    if pid not in _files:
        _files.clear()  # of the process that we were forked from; its number stays taken here
        if hasattr(os, "memfd_create"):
            _files[pid] = os.memfd_create("echelon-frames", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                _files[pid] = os.dup(file.fileno())
    return _files[pid]
