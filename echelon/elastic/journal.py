"""The coordinator's memory beyond its own life: one JSON object a line, only ever appended.

A line is there when add() returned: it outlives the process, and with `sync` the machine's power too. A last line
that was cut in mid-write is dropped on opening, because nobody was told of it yet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


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
        os.ftruncate(self._fd, good_bytes)
        self.size_bytes = good_bytes

    def add(self, record: dict[str, Any], *, sync: bool) -> None:
        """Appends one record."""
        line = _line(record)
        _write(self._fd, line)
        self.size_bytes += len(line)
        if sync:
            os.fsync(self._fd)

    def rewrite(self, records: Iterable[dict[str, Any]]) -> None:
        """Replaces the whole content at once: a crash leaves the old one or the new one."""
        fresh = self.path.with_suffix(".new")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.size_bytes = 0
        for record in records:
            line = _line(record)
            _write(fd, line)
            self.size_bytes += len(line)
        os.fsync(fd)
        os.rename(fresh, self.path)
        os.close(self._fd)
        self._fd = fd

    def close(self) -> None:
        os.close(self._fd)


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
