"""Where checkpoints lie: a folder, or anything fsspec knows. The boundary, and the local folder."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from echelon.errors import CheckpointError

Bytes = bytes | bytearray | memoryview

PARTIAL = ".partial"
"""How the name of a file ends that is still being written."""


class Store(Protocol):
    """Named files under one root; names use "/" and may be one folder deep. Use it from any thread.

    Every call blocks and raises CheckpointError, which says what the medium said, where, and what to do. Folders
    need not be made; one whose last file was removed may stay and be listed, empty.
    """

    url: str
    """The root, as a person would type it."""

    def put(self, name: str, chunks: Iterable[Bytes]) -> int:
        """Writes a file and gives its bytes: whole, durable and in place of an older one when this returns; not there
        (an older one as it was) when it raises, whatever `chunks` raised included. A chunk is ours until the next is asked for."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes | bytearray:
        """Bytes [start, stop) of a file, fewer where it ends sooner. FileNotFoundError when there is none."""

    def size(self, name: str) -> int | None:
        """Bytes of a file, None when there is none. Never from a cache."""

    def list(self, folder: str = "") -> dict[str, int | None]:
        """What lies directly in a folder: a file's bytes, None for a folder. Empty when there is no such folder."""

    def remove(self, name: str) -> None:
        """Removes a file; it is no error when there is none."""


class LocalStore:
    """A folder of this machine, or of a network file system that all machines mount."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()
        self.url = str(self.root)

    def put(self, name: str, chunks: Iterable[Bytes]) -> int:
        final = self.root / name
        partial = final.with_name(f".{final.name}.{secrets.token_hex(4)}{PARTIAL}")
        with self._explained("write", final):
            fd = self._create(partial)
            try:
                num_bytes = 0
                try:
                    for chunk in chunks:
                        num_bytes += _write(fd, chunk)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                os.replace(partial, final)
            except BaseException:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)
                self._drop_empty(final.parent)
                raise
            _sync_folder(final.parent)
            if final.parent != self.root:
                _sync_folder(self.root)
        return num_bytes

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes | bytearray:
        path = self.root / name
        with self._explained("read", path, absent=True), open(path, "rb", buffering=0) as file:
            length = (os.fstat(file.fileno()).st_size if stop is None else stop) - start
            held = bytearray(max(0, length))
            at = 0
            while at < len(held):
                got = os.preadv(file.fileno(), [memoryview(held)[at:]], start + at)
                if got == 0:
                    break
                at += got
            del held[at:]
            return held

    def size(self, name: str) -> int | None:
        path = self.root / name
        with self._explained("look at", path):
            try:
                found = path.stat()
                return found.st_size if stat.S_ISREG(found.st_mode) else None
            except (FileNotFoundError, NotADirectoryError):
                return None

    def list(self, folder: str = "") -> dict[str, int | None]:
        path = self.root / folder
        found: dict[str, int | None] = {}
        with self._explained("list", path):
            try:
                for entry in os.scandir(path):
                    with contextlib.suppress(FileNotFoundError):  # removed in this moment
                        found[entry.name] = None if entry.is_dir() else entry.stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return {}
        return found

    def remove(self, name: str) -> None:
        path = self.root / name
        with self._explained("remove", path):
            path.unlink(missing_ok=True)
            self._drop_empty(path.parent)

    def _create(self, path: Path) -> int:
        for _ in range(3):  # another rank may be removing the folder because it has just become empty
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        raise FileNotFoundError(errno.ENOENT, "the folder vanishes as soon as it is made", str(path.parent))

    def _drop_empty(self, folder: Path) -> None:
        if folder != self.root:
            with contextlib.suppress(OSError):
                folder.rmdir()

    @contextlib.contextmanager
    def _explained(self, verb: str, path: Path, *, absent: bool = False) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if absent and isinstance(error, FileNotFoundError):
                raise
            raise self._explain(verb, path, error) from error

    def _explain(self, verb: str, path: Path, error: OSError) -> CheckpointError:
        remedy = "Give another folder, or make this one writable."
        what = error.strerror or str(error)
        full = no_room(error, self.root)
        if full:
            what = full
            remedy = "Free some space, keep fewer checkpoints, or give a folder on another disk."
        elif error.errno in (errno.EIO, errno.ESTALE):
            remedy = "The disk or the network file system failed: see the system's log."
        return CheckpointError(f"cannot {verb} {path}: {what}", remedy=remedy)


def no_room(error: OSError, folder: Path) -> str:
    """What is said of a disk that is full; nothing of other errors."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    what = "the disk is full" if error.errno == errno.ENOSPC else "the quota is used up"
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(folder)
        what += f" ({usage.free >> 20} of {usage.total >> 20} MiB are free)"
    return what


def open_store(target: str | Path) -> Store:
    """The store at a folder's path or at a URL."""
    text = str(target)
    scheme, found, rest = text.partition("://")
    if not found:
        return LocalStore(text)
    if scheme in ("file", "local"):
        return LocalStore(rest)
    from echelon.checkpoint.remote import RemoteStore

    return RemoteStore(text)


def _write(fd: int, chunk: Bytes) -> int:
    view = memoryview(chunk).cast("B")
    done = 0
    while done < len(view):
        done += os.write(fd, view[done:])
    return done


def _sync_folder(path: Path) -> None:
    """Makes the names in a folder durable; some network file systems cannot, and then need not."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)
