"""How the values of a model are pulled piece by piece: which parameters come together, and where they lie on the servers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.ps.keys import Placement

MIB = 1 << 20

PIECE_BYTES = 2 * MIB
"""A piece is asked for, waited for and copied as one: smaller lets a layer begin earlier, larger costs fewer calls."""

GAP_BYTES = 4096
"""Spans of a memory this close together are pulled as one."""


@dataclass(frozen=True)
class Piece:
    """Parameters that are waited for together, and by server the bytes (begin, end) of its memory that hold them."""

    names: tuple[str, ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def nbytes(self) -> int:
        return sum(end - begin for of in self.spans for begin, end in of)


def cut(placement: Placement, order: Sequence[str], piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """The tensors in this order, neighbours together until they are a piece; a tensor is never cut."""
    sizes = {t.name: t.nbytes for t in placement.tensors}
    pieces: list[Piece] = []
    names: list[str] = []
    room = piece_bytes
    for name in order:
        if names and sizes[name] > room:
            pieces.append(_piece(placement, names))
            names, room = [], piece_bytes
        names.append(name)
        room -= sizes[name]
    return [*pieces, _piece(placement, names)] if names else pieces


def _piece(placement: Placement, names: Sequence[str]) -> Piece:
    found: list[list[tuple[int, int]]] = [[] for _ in placement.holders]
    for name in names:
        for r in placement.pieces(name):
            found[r.holder.rank].append((r.offset_bytes, r.offset_bytes + r.nbytes))
    return Piece(tuple(names), tuple(tuple(_joined(spans)) for spans in found))


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """In the order in which they lie there; those close together are one.

    What lies between two of them is pulled along: it is the same version, and is asked for by another piece as well.
    """
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if joined and begin - joined[-1][1] <= GAP_BYTES:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
