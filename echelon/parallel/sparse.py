"""Sparse gradients (embeddings): rows meet, not tables. All tables of a model share two messages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.clock import Deadline
from echelon.comm.group import Group, Lost, Outcome
from echelon.parallel.buckets import Slot
from echelon.parallel.gradsync import Share

ALIGN = 64


def sum_rows(
    grads: Sequence[Tensor | None], like: Sequence[Tensor], group: Group, deadline: Deadline
) -> tuple[Outcome, list[Tensor | None]]:
    """The sums over ranks of sparse gradients, in rank order; None where no rank has a row.

    1. counts: everybody's number of rows a table
    2. rows: ids and values of all tables as one block of bytes a rank, padded to the longest
    3. add: rows of all ranks, coalesced; the same bits on every rank
    """
    # counts
    device = like[0].device
    mine = torch.tensor([0 if g is None else g._nnz() for g in grads], device=device)
    counts = torch.zeros(group.size, len(grads), dtype=torch.int64, device=device)
    outcome = group.all_gather(counts, mine).wait(deadline)
    if isinstance(outcome, Lost):
        return outcome, [None] * len(grads)
    every = counts.tolist()
    # rows
    lengths = [sum(_block(n, p) for n, p in zip(row, like, strict=True)) for row in every]
    block = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    for (ids, values), grad in zip(_views(block, every[group.rank], like), grads, strict=True):
        if grad is not None:
            ids.copy_(grad._indices()[0])
            values.copy_(grad._values())
    blocks = torch.empty(group.size, block.numel(), dtype=torch.uint8, device=device)
    outcome = group.all_gather(blocks, block).wait(deadline)
    if isinstance(outcome, Lost):
        return outcome, [None] * len(grads)
    # add
    parts = [_views(blocks[r], every[r], like) for r in range(group.size)]
    return outcome, [_add([p[i] for p in parts], table) for i, table in enumerate(like)]


def meet_rows(slots: Sequence[Slot], share: Share, group: Group, deadline: Deadline) -> list[Outcome]:
    """Rows of all sparse parameters at once; `.grad` becomes their sum."""
    if not slots:
        return []
    grads = [rows_of(slot, share, group.size) for slot in slots]
    outcome, totals = sum_rows(grads, [s.param.detach() for s in slots], group, deadline)
    for slot, total in zip(slots, totals, strict=True):
        slot.param.grad = total
    return [outcome]


def rows_of(slot: Slot, share: Share, size: int) -> Tensor | None:
    """What a slot brings to the sum: its gradient by its share, and what the group held; None for nothing."""
    grad = slot.param.grad
    if grad is not None:
        grad = grad if grad.is_sparse else grad.to_sparse(1)
        if slot.stacked or not slot.fired:  # an earlier backward's, global already
            grad = grad * (1.0 / size)
        else:
            grad = grad * (share.weight * share.closing) if share.counts else None
    held = slot.held()
    if held is not None:
        grad = held * share.closing if grad is None else grad + held * share.closing
    return grad


def _add(parts: list[tuple[Tensor, Tensor]], table: Tensor) -> Tensor | None:
    ids = torch.cat([ids for ids, _ in parts])
    if not ids.numel():
        return None
    values = torch.cat([values for _, values in parts])
    return torch.sparse_coo_tensor(ids[None], values, size=table.shape, check_invariants=False).coalesce()


def _block(rows: int, table: Tensor) -> int:
    """Bytes that this many rows of a table take in a block: ids, then values, each aligned."""
    return _aligned(8 * rows) + _aligned(rows * math.prod(table.shape[1:]) * table.element_size())


def _views(block: Tensor, rows: Sequence[int], like: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(ids, values) of each table inside a block of bytes."""
    views, at = [], 0
    for n, table in zip(rows, like, strict=True):
        nbytes = n * math.prod(table.shape[1:]) * table.element_size()
        ids = block[at : at + 8 * n].view(torch.int64)
        at += _aligned(8 * n)
        values = block[at : at + nbytes].view(table.dtype).view(n, *table.shape[1:])
        at += _aligned(nbytes)
        views.append((ids, values))
    return views


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
