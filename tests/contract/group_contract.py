"""The contract of Group, as checks that every rank runs together. Any implementation passes all of them."""

from __future__ import annotations

import torch

from echelon.clock import Deadline
from echelon.comm.group import Group, Met

SOON_S = 30.0


def met(work):
    outcome = work.wait(Deadline.after(SOON_S))
    assert isinstance(outcome, Met), outcome
    return outcome


def sums(group: Group) -> None:
    for dtype in (torch.float32, torch.float64, torch.int64):
        x = torch.full((5,), group.rank + 1).to(dtype)
        met(group.all_reduce(x))
        assert x.tolist() == [group.size * (group.size + 1) // 2] * 5


def extremes(group: Group) -> None:
    x = torch.tensor([float(group.rank), -float(group.rank)])
    met(group.all_reduce(x, "max"))
    assert x.tolist() == [group.size - 1.0, 0.0]
    x = torch.tensor([float(group.rank)])
    met(group.all_reduce(x, "min"))
    assert x.item() == 0.0


def several_in_flight(group: Group) -> None:
    tensors = [torch.full((1000 * (i + 1),), float(group.rank + i)) for i in range(6)]
    works = [group.all_reduce(t) for t in tensors]
    for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        met(work)
        assert torch.all(tensor == sum(r + i for r in range(group.size)))


def gathers_in_rank_order(group: Group) -> None:
    x = torch.full((2, 3), group.rank)
    out = torch.zeros(group.size, 2, 3, dtype=torch.int64)
    met(group.all_gather(out, x))
    assert [int(out[r, 0, 0]) for r in range(group.size)] == list(range(group.size))


def broadcasts_from_any_root(group: Group) -> None:
    for root in range(group.size):
        x = torch.tensor([float(group.rank)])
        met(group.broadcast(x, root))
        assert x.item() == root


def the_same_bits_everywhere(group: Group) -> None:
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(100_003, generator=generator)
    met(group.all_reduce(x))
    every = torch.zeros(group.size, x.numel())
    met(group.all_gather(every, x))
    assert all(torch.equal(every[r], x) for r in range(group.size))


def buffers_are_zeroed_and_reducible(group: Group) -> None:
    flat = group.buffer(400).view(torch.float32)
    assert flat.numel() == 100
    assert not flat.any()
    flat += 1.0
    met(group.all_reduce(flat))
    assert torch.all(flat == group.size)


def waiting_again_gives_the_same(group: Group) -> None:
    work = group.barrier()
    assert met(work) == met(work)


CHECKS = [sums, extremes, several_in_flight, gathers_in_rank_order, broadcasts_from_any_root, the_same_bits_everywhere,
          buffers_are_zeroed_and_reducible, waiting_again_gives_the_same]  # fmt: skip
