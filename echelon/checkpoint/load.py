"""Reading checkpoints: which one is the latest, and any part of any tensor from whatever pieces it was saved in."""

from __future__ import annotations

import difflib
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.checkpoint import kinds, manifest, objects, prune, tensorfile
from echelon.checkpoint.holding import check_inside
from echelon.checkpoint.manifest import BLOCK_BYTES, Manifest, Piece, Tensors
from echelon.checkpoint.store import Store, open_store
from echelon.errors import CheckpointError
from echelon.mesh.layout import Key, Placed, Runs, Span
from echelon.mesh.runs import Patch, cut, overlaps

OLDER = "Resume from an older checkpoint of the same folder, or take this file from a copy."


class Saved:
    """One complete checkpoint. Opening it checked the manifest and the size of every file; reading checks the content.

    Blocks. Needs memory for one block (16 MiB) beside what it fills. Not for several threads at once.
    """

    def __init__(self, store: Store, folder: str, held: Manifest) -> None:
        self._store, self._folder, self._manifest = store, folder, held
        self.path = f"{store.url}/{folder}" if folder else store.url
        self.step, self.world_size, self.about = held.step, held.world_size, held.about
        self.time = held.time
        self.num_bytes = held.num_bytes
        self._headers: dict[str, dict[str, tensorfile.Entry]] = {}

    def keys(self) -> list[Key]:
        return list(self._manifest.tensors)

    def shape(self, key: Key) -> tuple[int, ...]:
        return self._tensor(key).shape

    def dtype(self, key: Key) -> torch.dtype:
        return self._tensor(key).dtype

    def read(self, key: Key, out: Tensor, span: Span | Placed | None = None) -> None:
        """Fills `out` (any device, contiguous or not) with the elements of `span` in its order, or with the whole tensor.

        CheckpointError that names the tensor when type or shape differ, or what was read is damaged: then the content of
        `out` is undefined.
        """
        saved = self._tensor(key)
        self._check_fits(saved, out, span)
        wanted = (span or Span.whole(saved.shape)).runs
        target = kinds.bits(out)
        times = 2 if saved.dtype.is_complex else 1
        for piece in saved.pieces:
            for number in range(len(piece.crc32)):
                patches = _patches(
                    piece.run, number * BLOCK_BYTES // saved.dtype.itemsize, saved.dtype.itemsize, wanted
                )
                if patches:
                    block = self._block(saved, piece, number)
                    kinds.lay(target, torch.frombuffer(block, dtype=target.dtype), patches, times)

    def ranks(self) -> list[int]:
        """Those whose objects are here; all others had rank 0's."""
        return sorted(self._manifest.objects)

    def objects(self, rank: int) -> Any:
        """The tree that `rank` saved; rank 0's for ranks that had the same, or were not there."""
        row = self._manifest.objects.get(rank) or self._manifest.objects.get(0)
        if row is None:
            raise CheckpointError(f"{self.path} holds no objects of rank {rank}")
        text = self._read(row.file, 0, self._manifest.files[row.file])
        if zlib.crc32(text) != row.crc32:
            raise tensorfile.damaged(f"{self.path}/{row.file}", "its checksum is wrong")

        def tensor(number: int) -> Tensor:
            if row.tensors is None:
                raise ValueError(f"tensor {number} is nowhere")
            entry = self._header(row.tensors)[str(number)]
            raw = self._read(row.tensors, entry.start, entry.stop)
            if zlib.crc32(raw) != row.tensor_crc32[number]:
                raise tensorfile.damaged(
                    f"{self.path}/{row.tensors}", f"the checksum of tensor {number} is wrong"
                )
            dtype = kinds.FROM_FILE[entry.dtype]
            if not raw:
                return torch.empty(entry.shape, dtype=dtype)
            return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).view(entry.shape)

        return objects.decode(bytes(text), tensor, f"{self.path}/{row.file}")

    def _tensor(self, key: Key) -> Tensors:
        try:
            return self._manifest.tensors[key]
        except KeyError:
            names = {k.name for k in self._manifest.tensors}
            has = (
                f"it has {key.name}, but not its slot {key.slot!r}"
                if key.name in names
                else _nearest(key.name, names)
            )
            raise CheckpointError(
                f"{self.path} has no {key.name} ({key.slot}): {has}",
                remedy="It is a checkpoint of another model, or the model was changed since.",
            ) from None

    def _check_fits(self, saved: Tensors, out: Tensor, span: Span | Placed | None) -> None:
        what = f"{saved.key.name} ({saved.key.slot})"
        here = tuple(out.shape) if span is None else tuple(span.shape)
        if here != saved.shape:
            raise CheckpointError(
                f"{what} has shape {_shape(saved.shape)} in {self.path}, and {_shape(here)} here",
                remedy="Build the model with the sizes it was saved with, or start without this checkpoint.",
            )
        if out.dtype != saved.dtype:
            raise CheckpointError(
                f"{what} is {kinds.name_of(saved.dtype)} in {self.path}, and {kinds.name_of(out.dtype)} here",
                remedy="Build the model in the type it was saved in, and convert it afterwards.",
            )
        if span is not None:
            check_inside(what, out.numel(), span, "cannot take")

    def _block(self, saved: Tensors, piece: Piece, number: int) -> bytearray:
        """A block of a piece, checked."""
        what = f"{self.path}/{piece.file}"
        entry = self._header(piece.file).get(piece.entry)
        num_bytes = piece.run.numel * saved.dtype.itemsize
        if (
            entry is None
            or entry.stop - entry.start != num_bytes
            or entry.dtype != kinds.FILE_NAMES[saved.dtype]
        ):
            raise tensorfile.damaged(
                what, f"it does not hold {saved.key.name} ({saved.key.slot}) as the manifest says"
            )
        start, stop = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, num_bytes)
        raw = self._read(piece.file, entry.start + start, entry.start + stop)
        if len(raw) != stop - start or zlib.crc32(raw) != piece.crc32[number]:
            raise tensorfile.damaged(what, f"the checksum of {saved.key.name} ({saved.key.slot}) is wrong")
        return raw if isinstance(raw, bytearray) else bytearray(raw)

    def _header(self, file: str) -> dict[str, tensorfile.Entry]:
        found = self._headers.get(file)
        if found is None:
            where, size = f"{self.path}/{file}", self._manifest.files[file]
            length = tensorfile.header_bytes(bytes(self._read(file, 0, tensorfile.LENGTH_BYTES)), size, where)
            start = tensorfile.LENGTH_BYTES
            text = bytes(self._read(file, start, start + length))
            found = self._headers[file] = tensorfile.read_header(text, size, where)
        return found

    def _read(self, file: str, start: int, stop: int) -> bytes | bytearray:
        try:
            return self._store.read(_join(self._folder, file), start, stop)
        except FileNotFoundError:
            raise CheckpointError(f"{self.path}/{file} is gone", remedy=OLDER) from None


def _patches(saved: Runs, start: int, itemsize: int, wanted: tuple[Runs, ...]) -> list[Patch]:
    """What a block that begins at element `start` of a saved piece has of what is wanted: places in the block, and in what is wanted."""
    stop = min(start + BLOCK_BYTES // itemsize, saved.numel)
    found, base = [], 0
    for mine in wanted:
        for at, part in cut((saved,), start, stop):
            for p in overlaps(part, mine):
                found.append(
                    Patch(p.at + at - start, p.step, p.other_at + base, p.other_step, p.length, p.count)
                )
        base += mine.numel
    return found


class Unusable(CheckpointError):
    """A folder that is no complete checkpoint. The message goes on after the folder's name."""


def latest(target: str | Path) -> tuple[Saved | None, list[str]]:
    """The highest step that is complete, None when there is none; and a sentence for each newer folder that is not."""
    store = open_store(target)
    skipped: list[str] = []
    names = [name for name, size in store.list().items() if size is None and prune.step_of(name) is not None]
    for name in sorted(names, key=lambda name: prune.step_of(name) or 0, reverse=True):
        try:
            return _open(store, name), skipped
        except Unusable as error:
            if store.list(name):  # some stores keep the folders of what was removed
                skipped.append(f"{name} {error.message}")
    return None, skipped


def open_saved(source: str | Path) -> Saved:
    """The checkpoint at a folder or URL (…/step-00000020). CheckpointError says what lies there if it is none."""
    text = str(source).rstrip("/")
    store = open_store(text)
    try:
        return _open(store, "")
    except Unusable as error:
        found, remedy = error.message, error.remedy
    above, _, name = text.rpartition("/")
    if name and open_store(above or ".").size(name) is not None:
        found = "is a file, and a checkpoint is a folder"
    raise CheckpointError(f"{text} {found}", remedy=remedy or _advice(text, store))


def _open(store: Store, folder: str) -> Saved:
    files = store.list(folder)
    if not files:
        raise Unusable("is not there")
    num_bytes = files.get(manifest.NAME)
    if num_bytes is None:
        raise Unusable("is incomplete: no manifest")
    if num_bytes > manifest.MAX_BYTES:
        raise Unusable(f"is damaged: a manifest of {num_bytes} bytes")
    try:
        text = store.read(_join(folder, manifest.NAME), 0, num_bytes)
    except FileNotFoundError:  # removed since it was listed
        raise Unusable("is incomplete: no manifest") from None
    try:
        held = manifest.read(text, manifest.NAME)
    except CheckpointError as error:
        raise Unusable(f"cannot be used: {error.message}", remedy=error.remedy) from None
    for name, wanted in held.files.items():
        if files.get(name) is None:
            raise Unusable(f"is damaged: {name} is missing", remedy=OLDER)
        if files[name] != wanted:
            raise Unusable(f"is damaged: {name} is truncated, {files[name]} of {wanted} bytes", remedy=OLDER)
    return Saved(store, folder, held)


def _advice(text: str, store: Store) -> str:
    folders = [
        name for name, size in store.list().items() if size is None and prune.step_of(name) is not None
    ]
    if folders:
        return f"It holds checkpoints: give one of them, such as {text}/{max(folders)}."
    if text.endswith((".pt", ".pth", ".bin", ".ckpt", ".pkl")):
        return (
            "Such a file is a pickle, which runs code when it is read: Echelon never reads one. Load it yourself with "
            "torch.load(…, weights_only=True) and model.load_state_dict(…) before prepare."
        )
    if text.endswith(".safetensors"):
        return "A file of weights is no checkpoint: load it with safetensors.torch.load_file and model.load_state_dict."
    return "A checkpoint is a folder step-00000020 that `run.checkpoint()` wrote; manifest.json makes it complete."


def _nearest(name: str, names: set[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f"the nearest name is {near[0]}" if near else f"it has {len(names)} other names"


def _shape(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
