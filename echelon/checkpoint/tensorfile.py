"""safetensors files, header only: how one begins, and what a header may say before it is believed.

Written by code of our own because the library builds the whole file in memory first; read by code of our own because
we want ranges of files that may lie in an object store, and may be damaged. The files are plain safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from echelon.errors import CheckpointError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The library's own limit."""

METADATA = "__metadata__"

BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
        "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
        "C64": 64}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: bytes [start, stop) of the file, the header counted in."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def header(entries: Sequence[tuple[str, str, Sequence[int], int]]) -> bytes:
    """The first bytes of a file whose tensors (name, dtype, shape, bytes) follow without a gap, in this order.

    Give wide types first: then every tensor lies aligned to its width, as readers that map the file expect.
    """
    table: dict[str, Any] = {METADATA: {"format": "pt"}}
    at = 0
    for name, dtype, shape, num_bytes in entries:
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + num_bytes]}
        at += num_bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{len(entries)} tensors make a header of {len(text)} bytes, too long for a file"
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_bytes(first: bytes, file_bytes: int, where: str) -> int:
    """How long the header is, from a file's first 8 bytes."""
    length = int.from_bytes(first, "little")
    if len(first) != LENGTH_BYTES or length > min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise damaged(where, f"its header claims {length} bytes of a file of {file_bytes}")
    return length


def read_header(text: bytes, file_bytes: int, where: str) -> dict[str, Entry]:
    """The tensors of a file from its header, every number checked against the file's size."""
    try:
        table = json.loads(text)
        table.pop(METADATA, None)
        found = {}
        for name, fields in table.items():
            dtype, shape = fields["dtype"], fields["shape"]
            start, stop = fields["data_offsets"]
            if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
                raise ValueError(f"{name}: a number is not one")
            if BITS[dtype] * math.prod(shape) != 8 * (stop - start):
                raise ValueError(f"{name}: {dtype} of shape {shape} in {stop - start} bytes")
            base = LENGTH_BYTES + len(text)
            if base + stop > file_bytes:
                raise ValueError(f"{name} ends at byte {base + stop} of {file_bytes}")
            found[name] = Entry(name, dtype, tuple(shape), base + start, base + stop)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(where, f"its header is wrong: {error}") from None
    return found


def damaged(where: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is damaged: {why}",
        remedy="Resume from an older checkpoint of the same folder, or take this file from a copy.",
    )
