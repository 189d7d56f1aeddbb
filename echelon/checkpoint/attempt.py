"""One rank's part of one checkpoint, from the copy to the verdict: what the background thread does.

1. copy: the rest of the share into the host buffer, beside the next forward and backward
2. write: the shard, then the objects, each file durable
3. agree: complete on all ranks or on none
4. tidy: what an attempt that failed left here; after a success, old checkpoints (rank 0)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from echelon.checkpoint import kinds, manifest, prune, tensorfile
from echelon.checkpoint.agree import AGREE_S, Agreement, Note, Verdict, see_files
from echelon.checkpoint.snapshot import Snapshot
from echelon.checkpoint.store import Store
from echelon.clock import Deadline
from echelon.errors import CheckpointError, EchelonError

LOOK_S = 1.0
"""How often a rank that writes looks whether another has called it off."""


class Attempt:
    """What one rank does for one checkpoint. begin() runs in a thread; `copied` is set when the tensors may change."""

    def __init__(
        self,
        store: Store,
        agreement: Agreement,
        snapshot: Snapshot,
        encoded: tuple[bytes, list[Tensor]],
        *,
        step: int,
        rank: int,
        about: Mapping[str, Any],
        keep: int,
    ) -> None:
        self.store, self.agreement, self.snapshot, self.encoded = store, agreement, snapshot, encoded
        self.step, self.rank, self.about, self.keep = step, rank, about, keep
        self.folder = prune.folder_name(step)
        self.copied = threading.Event()
        self.copy_s = self.write_s = self.stall_s = 0.0
        self.num_bytes = 0
        self.trouble = ""
        """What went wrong after the checkpoint was complete."""
        self._hex = secrets.token_hex(3)
        self._files: dict[str, int] = {}
        self._listed: Mapping[str, int] = {}
        self._next_look = 0.0

    def run(self, has_rest: bool, changed: Callable[[str], None]) -> Verdict:
        """All of it. Never raises; `changed` is told the state."""
        try:
            began = time.monotonic()
            try:
                if has_rest:
                    self.snapshot.copy_rest()
            finally:
                self.copied.set()
            self.snapshot.wait()
            self.copy_s += time.monotonic() - began
            changed("writing")
            note = self._write()
            verdict = (
                self.agreement.lead(note, self._commit) if self.rank == 0 else self.agreement.follow(note)
            )
        except Exception as error:
            verdict = self._failed(error)
        if not verdict.complete and not verdict.removable and self._named():
            verdict = Verdict(True)  # rank 0 died between the manifest and its word
        if verdict.removable:
            for name in self._files:
                with contextlib.suppress(CheckpointError):
                    self.store.remove(f"{self.folder}/{name}")
        elif verdict.complete and self.rank == 0:
            self._tidy()
        return verdict

    def _write(self) -> Note:
        began = time.monotonic()
        shard = f"shard-{self.rank:05d}.{self._hex}.safetensors"
        if self.snapshot.slots:
            self._put(shard, self.snapshot.chunks(self._look))
        objects = self._write_objects()
        self.write_s = time.monotonic() - began
        pieces = []
        for slot in self.snapshot.slots:
            run, held = slot.part.run, slot.part.holding
            pieces.append([held.key.name, held.key.slot, kinds.name_of(held.tensor.dtype), list(held.span.shape), shard,
                           slot.entry, run.start, run.start + run.length, slot.crc32, run.period, run.count])  # fmt: skip
        return {"host": socket.gethostname(), "path": f"{self.store.url}/{self.folder}", "files": self._files,
                "pieces": pieces, "objects": objects, "copy_s": self.copy_s, "write_s": self.write_s,
                "stall_s": self.stall_s}  # fmt: skip

    def _write_objects(self) -> dict[str, Any] | None:
        """Two files, or none when rank 0 writes the same."""
        text, tensors = self.encoded
        ordered = sorted(range(len(tensors)), key=lambda n: -tensors[n].itemsize)
        views = {n: memoryview(_flat_bytes(tensors[n])) for n in ordered}
        digest = hashlib.sha256(text)
        for n in range(len(tensors)):
            digest.update(views[n])
        first = self.agreement.first_objects(digest.hexdigest(), Deadline.after(AGREE_S))
        if self.rank > 0 and first == digest.hexdigest():
            return None
        base = f"objects-{self.rank:05d}.{self._hex}"
        self._put(f"{base}.json", [text])
        if tensors:
            head = tensorfile.header(
                [
                    (str(n), kinds.file_name(tensors[n].dtype, "a tensor"), tensors[n].shape, views[n].nbytes)
                    for n in ordered
                ]
            )
            self._put(f"{base}.safetensors", [head, *views.values()])
        return {"file": f"{base}.json", "crc32": zlib.crc32(text), "tensors": f"{base}.safetensors" if tensors else None,
                "tensor_crc32": [zlib.crc32(views[n]) for n in range(len(tensors))]}  # fmt: skip

    def _put(self, name: str, chunks: Any) -> None:
        self._files[name] = 0  # to be removed even if its writing fails in the middle
        self._files[name] = self.store.put(f"{self.folder}/{name}", chunks)

    def _look(self) -> None:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            self.agreement.look()

    def _commit(self, notes: list[Note]) -> Callable[[], None]:
        """Rank 0: is everything there? Gives what makes it complete."""
        see_files(self.store, self.folder, notes)
        whole = manifest.assemble(self.step, time.time(), self.about, notes)
        text = manifest.write(whole)
        self.num_bytes = whole.num_bytes + len(text)
        self.copy_s, self.write_s, self.stall_s = (
            max(note[name] for note in notes) for name in ("copy_s", "write_s", "stall_s")
        )

        def write() -> None:
            try:
                self.store.put(f"{self.folder}/{manifest.NAME}", [text])
            except CheckpointError:
                if not self._named():  # an answer that got lost is no failure
                    raise
            self._listed = whole.files

        return write

    def _failed(self, error: Exception) -> Verdict:
        said = error.message if isinstance(error, EchelonError) else f"{type(error).__name__}: {error}"
        remedy = error.remedy if isinstance(error, EchelonError) else ""
        where = f"rank {self.rank} on {socket.gethostname()}: "
        already = said.startswith("rank ")
        text = f"{'' if already else where}{said}" + (f"\n  {remedy}" if remedy else "")
        return self.agreement.call_off(text)

    def _named(self) -> bool:
        """Does the manifest that lies there name what this rank wrote?"""
        try:
            text = self.store.read(f"{self.folder}/{manifest.NAME}", 0, manifest.MAX_BYTES)
            named = json.loads(bytes(text))["files"]
            return bool(self._files) and all(name in named for name in self._files)
        except Exception:
            return False

    def _tidy(self) -> None:
        try:
            prune.prune(self.store, self.folder, self.keep, self._listed)
        except EchelonError as error:
            self.trouble = f"old checkpoints could not be removed: {error.message}"


def _flat_bytes(tensor: Tensor) -> Any:
    return kinds.bits(tensor).contiguous().reshape(-1).numpy().view("uint8")
