"""manifest.json: what makes a checkpoint complete, and says where each element of each tensor lies.

Read as if a stranger had written it: every name and number is checked before it is used.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from echelon.checkpoint import kinds
from echelon.errors import CheckpointError
from echelon.mesh.layout import Key, Runs
from echelon.mesh.runs import uncovered

FORMAT = 2
PLAIN = 1
"""The format of a checkpoint all of whose pieces are stretches: written where it suffices, so that older versions read it too."""

NAME = "manifest.json"
MAX_BYTES = 1 << 30
BLOCK_BYTES = 16 << 20
"""A piece carries one crc32 for each block of this size, so that a part of it can be read and still be checked."""

END = re.compile(rb',\n "crc32": (\d{1,10})\n}\n\Z')
"""How a manifest ends: the checksum of all that stands before."""

FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a tensor, and `count` - 1 stretches as long, each `period` after the one before: the entry of a
    file."""

    file: str
    entry: str
    start: int
    stop: int
    crc32: tuple[int, ...]
    period: int = 0
    count: int = 1

    @property
    def run(self) -> Runs:
        return Runs(self.start, self.stop - self.start, self.period, self.count)

    def row(self) -> dict[str, Any]:
        """As JSON has it."""
        return {k: v for k, v in vars(self).items() if self.count > 1 or k not in ("period", "count")}


@dataclass(frozen=True)
class Tensors:
    """One tensor of the state; its pieces cover it once, in the order in which they begin."""

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class ObjectsFile:
    """A rank's tree: a JSON file with its crc32, and the file of its tensors (None: it has none)."""

    file: str
    crc32: int
    tensors: str | None
    tensor_crc32: tuple[int, ...] = ()


@dataclass(frozen=True)
class Manifest:
    step: int
    world_size: int
    time: float
    about: dict[str, Any]
    tensors: dict[Key, Tensors]
    objects: dict[int, ObjectsFile]
    """By rank; ranks whose tree was that of rank 0 are not in it."""
    files: dict[str, int] = field(default_factory=dict)
    """Every file of the checkpoint, with its bytes."""

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())


def write(manifest: Manifest) -> bytes:
    """As JSON, one line a tensor, so that a person can read and search it."""
    split = any(piece.count > 1 for t in manifest.tensors.values() for piece in t.pieces)
    head = {
        "format": FORMAT if split else PLAIN,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "time": manifest.time,
        "block_bytes": BLOCK_BYTES,
        "about": manifest.about,
        "files": manifest.files,
        "objects": {str(rank): vars(objects) for rank, objects in sorted(manifest.objects.items())},
    }
    rows = [
        {"name": t.key.name, "slot": t.key.slot, "dtype": kinds.name_of(t.dtype), "shape": t.shape,
         "pieces": [piece.row() for piece in t.pieces]}
        for t in manifest.tensors.values()
    ]  # fmt: skip
    tensors = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    text = (json.dumps(head, indent=1, allow_nan=False)[:-2] + f',\n "tensors": [\n{tensors}\n]').encode()
    return text + b',\n "crc32": %d\n}\n' % zlib.crc32(text)


def assemble(
    step: int, time: float, about: Mapping[str, Any], notes: Sequence[Mapping[str, Any]]
) -> Manifest:
    """The manifest of what all ranks wrote: `notes[rank]` has "files", "pieces" and "objects" (None: as rank 0's)."""
    found: dict[Key, tuple[str, tuple[int, ...], list[Piece]]] = {}
    files: dict[str, int] = {}
    objects = {}
    for rank, note in enumerate(notes):
        files |= note["files"]
        if note["objects"] is not None:
            objects[rank] = _objects(note["objects"])
        for name, slot, dtype, shape, file, entry, start, stop, crc32, period, count in note["pieces"]:
            key = Key(name, slot)
            known = found.setdefault(key, (dtype, tuple(shape), []))
            if known[:2] != (dtype, tuple(shape)):
                raise CheckpointError(
                    f"{name} ({slot}) is {dtype} {tuple(shape)} on rank {rank} and {known[0]} {known[1]} on another",
                    remedy="The ranks do not train the same model.",
                )
            known[2].append(Piece(file, entry, start, stop, tuple(crc32), period, count))
    tensors = {}
    for key, (dtype, shape, pieces) in sorted(found.items(), key=lambda item: (item[0].name, item[0].slot)):
        pieces.sort(key=lambda piece: (piece.start, piece.stop))
        _check_cover(key, shape, pieces)
        tensors[key] = Tensors(key, kinds.NAMES[dtype], shape, tuple(pieces))
    return Manifest(step, len(notes), time, dict(about), tensors, objects, dict(sorted(files.items())))


def read(text: bytes | bytearray, where: str) -> Manifest:
    """Checks everything it says but the files themselves."""
    try:
        plain = json.loads(text)
        if not isinstance(plain, dict) or "format" not in plain:
            raise ValueError("it is not a manifest of ours")
        if plain["format"] not in (PLAIN, FORMAT):
            raise CheckpointError(
                f"{where} has format {plain['format']}, and this version of Echelon reads formats {PLAIN} and {FORMAT}",
                remedy="Use the version that wrote it, or a newer one.",
            )
        end = END.search(text)
        if end is None or int(end[1]) != zlib.crc32(text[: end.start()]):
            raise ValueError("its checksum is wrong")
        if plain["block_bytes"] != BLOCK_BYTES:
            raise ValueError(f"block_bytes is {plain['block_bytes']}")
        files = {_file(name): _number(num_bytes) for name, num_bytes in plain["files"].items()}
        tensors = {}
        for row in plain["tensors"]:
            one = _tensor(row, files)
            if one.key in tensors:
                raise ValueError(f"{one.key} is there twice")
            tensors[one.key] = one
        objects = {int(rank): _objects(row) for rank, row in plain["objects"].items()}
        for row in objects.values():
            if row.file not in files or (row.tensors is not None and row.tensors not in files):
                raise ValueError(f"{row.file} is not in its list of files")
        return Manifest(_number(plain["step"]), _number(plain["world_size"]), float(plain["time"]),
                        dict(plain["about"]), tensors, objects, files)  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is damaged: {type(error).__name__}: {error}",
            remedy="Resume from an older checkpoint of the same folder.",
        ) from None


def blocks(num_bytes: int) -> int:
    """How many checksums a piece of so many bytes carries."""
    return -(-num_bytes // BLOCK_BYTES)


def _tensor(row: Mapping[str, Any], files: Mapping[str, int]) -> Tensors:
    key = Key(str(row["name"]), str(row["slot"]))
    dtype = kinds.NAMES[row["dtype"]]
    shape = tuple(_number(n) for n in row["shape"])
    if math.prod(max(n, 1) for n in shape) > kinds.MAX_ELEMENTS:
        raise ValueError(f"{key.name} would have {math.prod(shape)} elements")
    pieces = []
    for p in row["pieces"]:
        piece = Piece(
            _file(p["file"]), str(p["entry"]), _number(p["start"]), _number(p["stop"]),
            tuple(_number(crc) for crc in p["crc32"]), _number(p.get("period", 0)), _number(p.get("count", 1)),
        )  # fmt: skip
        num_bytes = piece.run.numel * dtype.itemsize
        if num_bytes > files[piece.file] or len(piece.crc32) != blocks(num_bytes):
            raise ValueError(f"{key.name}: {num_bytes} bytes in {piece.file} of {files[piece.file]}")
        pieces.append(piece)
    _check_cover(key, shape, pieces)
    return Tensors(key, dtype, shape, tuple(pieces))


def _check_cover(key: Key, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
    """Raises CheckpointError unless every element is in exactly one piece."""
    why = uncovered(math.prod(shape), [piece.run for piece in pieces])
    if why:
        raise CheckpointError(
            f"the pieces of {key.name} ({key.slot}), shape {shape}, do not cover it once: {why}"
        )


def _objects(row: Mapping[str, Any]) -> ObjectsFile:
    tensors = row["tensors"]
    return ObjectsFile(
        _file(row["file"]), _number(row["crc32"]), None if tensors is None else _file(tensors),
        tuple(_number(crc) for crc in row["tensor_crc32"]),
    )  # fmt: skip


def _file(name: Any) -> str:
    """A file beside the manifest: never a path, so that none leads out of the folder."""
    if not isinstance(name, str) or not FILE.fullmatch(name) or name == NAME:
        raise ValueError(f"{name!r} is not the name of a file of a checkpoint")
    return name


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
