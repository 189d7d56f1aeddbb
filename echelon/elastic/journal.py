"""The coordinator's memory beyond its own life: one JSON object a line, only ever appended.

A line is there when add() returned: it outlives the process, and with `sync` the machine's power too. A last line
that was cut in mid-write is dropped on opening, because nobody was told of it yet. Room for a long run is reserved at the
start, so that a disk that fills up later does not matter; a disk that is full beyond that costs what the file would have
kept for a coordinator that is started again, and not the run: lines are held and written as soon as there is room.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESERVED_BYTES = 1 << 20
KEEP_SIZE = 1


class Journal:
    """Owned by one process. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """Opens or makes the file, and reads what is there into `records`."""
        self.path = path
        self.records: list[dict[str, Any]] = []
        good_bytes = 0
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
            try:
                record = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                record = None
            if not isinstance(record, dict):
                break
            self.records.append(record)
            good_bytes += len(line)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if os.fstat(self._fd).st_size != good_bytes:  # it would give up what is reserved
            os.ftruncate(self._fd, good_bytes)
        self.size_bytes = good_bytes
        self._owed: list[bytes] = []
        _reserve(self._fd, good_bytes)

    def add(self, record: dict[str, Any], *, sync: bool) -> None:
        """Appends one record, or holds it until there is room."""
        told = bool(self._owed)
        self._owed.append(_line(record))
        try:
            while self._owed:
                _write(self._fd, self._owed[0])
                self.size_bytes += len(self._owed.pop(0))
            if sync:
                os.fsync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size_bytes)  # no half of a line
            if not told:
                words = f"cannot write {self.path}: {error.strerror}. The run goes on; if its coordinator ends now, it cannot"
                print(words, "be started again where it was.", file=sys.stderr, flush=True)

    def rewrite(self, records: Iterable[dict[str, Any]]) -> None:
        """Replaces the whole content at once: a crash, or a full disk, leaves the old one or the new one."""
        fresh, text = self.path.with_suffix(".new"), b"".join(_line(record) for record in records)
        fd = -1
        try:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            _write(fd, text)
            os.fsync(fd)
            os.rename(fresh, self.path)
        except OSError:
            if fd >= 0:
                os.close(fd)
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            return
        os.close(self._fd)
        self._fd, self.size_bytes, self._owed = fd, len(text), []
        _reserve(fd, len(text))

    def close(self) -> None:
        os.close(self._fd)


def _reserve(fd: int, begin: int) -> None:
    """Room on the disk behind `begin`; the file is no longer for it. Where the filesystem cannot, it is not reserved."""
    with contextlib.suppress(OSError, AttributeError):
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        fallocate(fd, KEEP_SIZE, ctypes.c_int64(begin), ctypes.c_int64(RESERVED_BYTES))


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
