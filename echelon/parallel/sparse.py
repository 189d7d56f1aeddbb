"""Sparse gradients (embeddings): rows meet, not tables."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.clock import Deadline
from echelon.comm.group import Group, Lost, Outcome


def sum_rows(grad: Tensor | None, like: Tensor, weight: float, group: Group, deadline: Deadline) -> tuple[Outcome, Tensor | None]:
    """The weighted sum over ranks of sparse gradients, in rank order; None here means that this rank has no rows.

    Every rank sends its own rows only, padded to the longest. The outcome's tensor is coalesced.
    """
    mine = grad.coalesce() if grad is not None else None
    rows = mine.values().shape[0] if mine is not None else 0
    shape = like.shape[1:]
    counts = torch.zeros(group.size, 1, dtype=torch.int64, device=like.device)
    outcome = group.all_gather(counts, torch.tensor([rows], device=like.device)).wait(deadline)
    if isinstance(outcome, Lost):
        return outcome, None
    most = int(counts.max())
    ids = torch.zeros(most, dtype=torch.int64, device=like.device)
    values = torch.zeros(most, *shape, dtype=like.dtype, device=like.device)
    if mine is not None:
        ids[:rows] = mine.indices()[0]
        torch.mul(mine.values(), weight, out=values[:rows])
    all_ids = torch.zeros(group.size, most, dtype=torch.int64, device=like.device)
    all_values = torch.zeros(group.size, most, *shape, dtype=like.dtype, device=like.device)
    works = [group.all_gather(all_ids, ids), group.all_gather(all_values, values)]
    for work in works:
        outcome = work.wait(deadline)
        if isinstance(outcome, Lost):
            return outcome, None
    keep = [slice(0, int(n)) for n in counts[:, 0]]
    cat_ids = torch.cat([all_ids[r][k] for r, k in enumerate(keep)])
    cat_values = torch.cat([all_values[r][k] for r, k in enumerate(keep)])
    total = torch.sparse_coo_tensor(cat_ids[None], cat_values, size=like.shape, check_invariants=False)
    return outcome, total.coalesce()
