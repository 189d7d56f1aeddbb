"""A file under another name that several processes of one host fill, before it replaces the one that was there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from echelon.prepare.stream import Block

LONG_BYTES = 1024
"""Runs from this length on are written one by one; of shorter ones, many at once through a mapping of the file."""

WINDOW_BYTES = 16 << 20


class Partial:
    """A file under another name beside the one that it will replace. Made by one process, opened by others that see the same disk."""

    def __init__(self, path: Path, fd: int, reserved: bool) -> None:
        self.path, self._fd, self._reserved = path, fd, reserved

    @classmethod
    def make(cls, target: Path, num_bytes: int) -> tuple[Partial, dict[str, Any]]:
        """A new one, its space reserved, and a word by which others know it. Removes what killed processes left. OSError."""
        target = target.absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        path = target.with_name(f".{target.name}.{secrets.token_hex(6)}.partial")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        made = cls(path, fd, reserved=False)
        try:
            with contextlib.suppress(OSError):  # whoever can take it knows that we are gone
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            made._reserved = _reserve(fd, num_bytes)
            nonce = secrets.token_hex(16)
            os.pwrite(fd, nonce.encode(), 0)
            seen = os.fstat(fd)
        except BaseException:
            made.discard()
            raise
        word = {"path": str(path), "nonce": nonce, "id": [seen.st_dev, seen.st_ino], "host": host(),
                "reserved": made._reserved}  # fmt: skip
        return made, word

    @classmethod
    def find(cls, word: Mapping[str, Any]) -> Partial | None:
        """The file of another process of this host, or None: on another host, or where it is not seen. Several hosts never write into
        one file, since their caches do not know of each other."""
        if word["host"] != host():
            return None
        try:
            fd = os.open(word["path"], os.O_RDWR)
        except OSError:
            return None
        seen = os.fstat(fd)
        nonce = str(word["nonce"]).encode()
        if [seen.st_dev, seen.st_ino] != word["id"] or os.pread(fd, len(nonce), 0) != nonce:
            os.close(fd)
            return None
        return cls(Path(word["path"]), fd, bool(word["reserved"]))

    def put(self, block: Block) -> None:
        """OSError when the disk does not take it."""
        view = memoryview(block.data)
        if block.length >= len(view):
            self.write(view, block.at)
        elif block.length >= LONG_BYTES or not self._reserved:
            for row in range(len(view) // block.length):
                part = view[row * block.length : (row + 1) * block.length]
                self.write(part, block.at + row * block.period)
        else:
            self._scatter(block)

    def write(self, data: Any, at: int) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(self._fd, view, at)
            view, at = view[done:], at + done

    def _scatter(self, block: Block) -> None:
        """Short runs, many at once. Its space is reserved, so that no page can fail to be there."""
        rows = np.asarray(block.data).reshape(-1, block.length)
        each = max(1, WINDOW_BYTES // block.period)
        for first in range(0, len(rows), each):
            part = rows[first : first + each]
            at = block.at + first * block.period
            base = at - at % mmap.ALLOCATIONGRANULARITY
            length = at - base + (len(part) - 1) * block.period + block.length
            with mmap.mmap(self._fd, length, offset=base) as mapped:
                there = np.frombuffer(mapped, np.uint8, offset=at - base)
                strided = np.lib.stride_tricks.as_strided(there, part.shape, (block.period, 1))
                strided[...] = part
                del there, strided

    def replace(self, target: Path, header: bytes) -> None:
        """Durable and under its name: what was there before is gone. OSError."""
        self.write(header, 0)
        os.fsync(self._fd)
        os.replace(self.path, target.absolute())
        folder = os.open(target.absolute().parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def discard(self) -> None:
        """Away with it, if it has not replaced anything."""
        self.path.unlink(missing_ok=True)
        self.close()


def host() -> str:
    """One word for each running system: processes with the same one share their page cache."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.uname().nodename


def _reserve(fd: int, num_bytes: int) -> bool:
    """Takes the space now, so that a full disk is known before anything is written; False where the file system cannot."""
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        return True
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
    os.ftruncate(fd, num_bytes)
    return False


def _sweep(target: Path) -> None:
    for left in target.parent.glob(f".{_escaped(target.name)}.*.partial"):
        with contextlib.suppress(OSError), open(left, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
