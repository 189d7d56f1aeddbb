"""all_reduce of sparse (COO) tensors: every rank gathers everybody's rows and adds them in rank order."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.backend.stage import Stage
from echelon.clock import Deadline
from echelon.comm.group import Done, Group, Lost, Work


def all_reduce(group: Group, x: Tensor, stage: Stage, deadline: Deadline) -> list[Work]:
    """Begins the sum of x over ranks. Blocks only until it is known how many entries each rank has."""
    mine = x.detach().coalesce()
    indices, values = mine.indices().cpu(), mine.values().cpu()
    counts = torch.zeros(group.size, dtype=torch.int64)
    outcome = group.all_gather(counts, torch.tensor(values.shape[0])).wait(deadline)
    if isinstance(outcome, Lost):
        return [Done(outcome)]
    most = int(counts.max())
    all_indices = torch.empty(group.size, indices.shape[0], most, dtype=torch.int64)
    all_values = torch.empty(group.size, most, *values.shape[1:], dtype=values.dtype)

    def put() -> None:
        parts = [(all_indices[r, :, :n], all_values[r, :n]) for r, n in enumerate(counts.tolist())]
        total = torch.sparse_coo_tensor(
            torch.cat([i for i, _ in parts], 1),
            torch.cat([v for _, v in parts]),
            x.shape,
            check_invariants=True,
        )
        with torch.no_grad():  # not x.detach(), which would have entries of its own
            x.copy_(total.coalesce().to(x.device))

    stage.then(put)
    return [
        group.all_gather(all_indices, _padded(indices, 1, most)),
        group.all_gather(all_values, _padded(values, 0, most)),
    ]


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = length - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim).contiguous()
