"""A store at a URL, through fsspec: s3://bucket/folder, gs://…, hdfs://…, memory://… in tests.

Credentials and endpoints are fsspec's own affair: AWS_* variables and files, FSSPEC_S3_ENDPOINT_URL, ~/.config/fsspec.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from echelon.checkpoint.store import Bytes
from echelon.errors import CheckpointError

PART_BYTES = 16 << 20
"""Files up to this are one PUT; longer ones are uploaded in parts of it, which is also the memory an upload takes."""

EXTRAS = {"s3": "s3", "s3a": "s3"}
"""Extras of our package that bring what a protocol needs."""


class RemoteStore:
    """See Store. Where uploads of parts are atomic (S3 and its kin), every put is; elsewhere those of one part are."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        scheme = url.partition("://")[0]
        try:
            from fsspec.core import url_to_fs

            self.files, self.root = url_to_fs(self.url, use_listings_cache=False, **_options(scheme))
        except ImportError as error:
            package = f"echelon-train[{EXTRAS[scheme]}]" if scheme in EXTRAS else "the package it names"
            raise CheckpointError(
                f"{url} cannot be opened: {error}", remedy=f"Install it: pip install '{package}'."
            ) from None
        except ValueError as error:
            raise CheckpointError(
                f"{url} cannot be opened: {error}", remedy="Give a folder, or a URL that fsspec knows."
            ) from None

    def put(self, name: str, chunks: Iterable[Bytes]) -> int:
        path, held, file, num_bytes = self._path(name), bytearray(), None, 0
        with self._explained("write", path):
            try:
                for chunk in chunks:
                    view = memoryview(chunk).cast("B")
                    num_bytes += len(view)
                    if file is None and num_bytes <= PART_BYTES:
                        held += view
                        continue
                    if file is None:
                        self._make_folder(path)
                        file = self.files.open(path, "wb", block_size=PART_BYTES)
                        file.write(bytes(held))
                        held.clear()
                    for at in range(0, len(view), PART_BYTES):
                        file.write(view[at : at + PART_BYTES])
                if file is None:
                    self._make_folder(path)
                    self.files.pipe_file(path, bytes(held))
                else:
                    file.close()
            except BaseException:
                if file is not None:
                    self._give_up(file, path)
                raise
        return num_bytes

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes | bytearray:
        if stop is not None and stop <= start:
            return b""
        path = self._path(name)
        with self._explained("read", path, absent=True):
            return bytes(self.files.cat_file(path, start=start or None, end=stop))

    def size(self, name: str) -> int | None:
        path = self._path(name)
        with self._explained("look at", path):
            self.files.invalidate_cache(path.rpartition("/")[0])
            try:
                found = self.files.info(path)
            except FileNotFoundError:
                return None
            return int(found["size"]) if found["type"] == "file" else None

    def list(self, folder: str = "") -> dict[str, int | None]:
        path = self._path(folder) if folder else self.root
        with self._explained("list", path):
            self.files.invalidate_cache(path)
            try:
                rows = self.files.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        found = {}
        for row in rows:
            name = str(row["name"]).rstrip("/")
            if name.strip("/") != path.strip("/"):  # some stores list a folder's own marker
                found[name.rpartition("/")[2]] = int(row["size"]) if row["type"] == "file" else None
        return found

    def remove(self, name: str) -> None:
        path = self._path(name)
        with self._explained("remove", path), contextlib.suppress(FileNotFoundError):
            self.files.rm_file(path)

    def _path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    def _make_folder(self, path: str) -> None:
        """File systems need it; object stores, which have no folders, would try to make a bucket."""
        if self.files.protocol not in (("s3", "s3a"), "memory", ("gs", "gcs"), ("abfs", "az", "abfss")):
            self.files.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _give_up(self, file: Any, path: str) -> None:
        """Ends an upload so that nothing of it appears: closing the file would complete it."""
        with contextlib.suppress(Exception):
            file.forced = True  # else closing would send the last part
            file.discard()
        with contextlib.suppress(Exception):
            file.closed = True
        if self.files.protocol == "memory" or not hasattr(file, "mpu"):
            with contextlib.suppress(Exception):
                self.files.rm_file(path)

    @contextlib.contextmanager
    def _explained(self, verb: str, path: str, *, absent: bool = False) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # each protocol has errors of its own
            if absent and isinstance(error, FileNotFoundError):
                raise
            said = " ".join(str(error).split()) or type(error).__name__
            raise CheckpointError(
                f"cannot {verb} {path} at {self.url}: {type(error).__name__}: {said[:500]}",
                remedy=_remedy(error),
            ) from error


def _options(scheme: str) -> dict[str, Any]:
    """s3fs tries a failed request again 5 times, and botocore below it 5 times each: a dead server took 12 s to show.
    What the user's own configuration of fsspec says wins."""
    from fsspec.config import conf

    if scheme not in ("s3", "s3a") or "config_kwargs" in conf.get(scheme, {}):
        return {}
    return {"config_kwargs": {"retries": {"max_attempts": 1}}}


def _remedy(error: Exception) -> str:
    if isinstance(error, PermissionError) or "redential" in type(error).__name__:
        return (
            "Check the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE) and their rights."
        )
    if isinstance(error, FileNotFoundError):
        return "Does the bucket exist? Echelon makes none."
    return "Is the store reachable from here? Its address is set by FSSPEC_S3_ENDPOINT_URL (docs/checkpoints.md)."
