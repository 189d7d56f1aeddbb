"""What coded gradients still owe, to and from checkpoints.

At the number of workers that saved it, every worker gets its own back, bit for bit. At another number nothing is lost
either: what counts is the sum over workers, so the residuals of workers 0, n, 2n, … go to worker 0 of n, and so on; what
the coded sums owe is read in whatever spans it is held now, or by worker 0 where sums are no longer coded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from echelon.checkpoint.holding import Holding
from echelon.checkpoint.load import Saved
from echelon.mesh.layout import Key, Span
from echelon.parallel.carried import DIRECTION, OWN, SUM, Piece
from echelon.parallel.coded import CodedWire
from echelon.parallel.gradsync import GradSync

DROPPED = (
    "the checkpoint holds what compressed gradients still owed, and this run does not compress: it is dropped.\n"
    "  The first step differs a little from what it would have been."
)


def holdings(syncs: Iterable[GradSync], names: Mapping[int, str]) -> Iterator[Holding]:
    """Every piece. Backward changes them, so they are copied at once."""
    for wire in coded(syncs):
        for piece in wire.pieces():
            span = Span(piece.shape, piece.start, piece.start + piece.tensor.numel())
            yield Holding(_key(piece, names), piece.tensor, span, piece.copies, settled=False)


@torch.no_grad()
def restore(syncs: Iterable[GradSync], names: Mapping[int, str], saved: Saved) -> str:
    """Gives every wire what it owed; a warning where there is none to take it."""
    here = {key for key in set(saved.keys()) if key.slot in (OWN, SUM, DIRECTION)}
    wires = list(coded(syncs))
    for wire in wires:
        for piece in wire.pieces():
            _read(piece, names, saved, here, wire.group.rank, wire.group.size)
        wire.keep()
    return DROPPED if here and not wires else ""


def coded(syncs: Iterable[GradSync]) -> Iterator[CodedWire]:
    return (sync.wire for sync in syncs if isinstance(sync.wire, CodedWire))


def _read(piece: Piece, names: Mapping[int, str], saved: Saved, here: set[Key], rank: int, size: int) -> None:
    key, out = _key(piece, names), piece.tensor
    if piece.kind == DIRECTION:
        if key in here and saved.shape(key) == piece.shape:
            saved.read(key, out, Span.whole(piece.shape))
        return
    out.zero_()
    if piece.kind == SUM:
        if key in here:
            saved.read(key, out, Span(piece.shape, piece.start, piece.start + out.numel()))
        return
    if key in here:
        workers, numel = saved.shape(key)
        for worker in range(rank, workers, size):
            _add(saved, key, out, Span((workers, numel), worker * numel, (worker + 1) * numel))
    total = Key(key.name, SUM)
    if rank == 0 and not piece.sums and total in here:
        _add(saved, total, out, Span.whole((out.numel(),)))


def _add(saved: Saved, key: Key, out: Tensor, span: Span) -> None:
    read = torch.empty_like(out)
    saved.read(key, read, span)
    out.add_(read)


def _key(piece: Piece, names: Mapping[int, str]) -> Key:
    return Key(names[id(piece.slot.param)], piece.kind)
