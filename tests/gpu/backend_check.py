"""The torch backend with tensors of a GPU, run by hand on a machine that has one: two ranks share it. Exits 1 if wrong.

torchrun --nproc-per-node 2 tests/gpu/backend_check.py
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon.torch_backend

DEVICE = torch.device("cuda", 0)


def numbers(rank: int, size: int) -> None:
    """Every kind of staging: in place, rows, flat, not contiguous, on another stream."""
    x = torch.full((1000, 3), rank + 1.0, device=DEVICE)
    dist.all_reduce(x)
    assert torch.all(x == 3)
    crooked = torch.full((3, 1000), rank + 1.0, device=DEVICE).t()
    dist.all_reduce(crooked)
    assert torch.all(crooked == 3)
    rows = [torch.zeros(5, device=DEVICE) for _ in range(size)]
    dist.all_gather(rows, torch.full((5,), float(rank), device=DEVICE))
    assert [row[0].item() for row in rows] == [0, 1]
    several = [torch.ones(7, device=DEVICE), torch.ones(2, 2, device=DEVICE)]
    with dist._coalescing_manager():
        for t in several:
            dist.all_reduce(t)
    assert all(torch.all(t == size) for t in several)
    out = torch.zeros(4, device=DEVICE)
    dist.reduce_scatter_tensor(out, torch.arange(8.0, device=DEVICE))
    assert out[0].item() == 8.0 * rank
    with torch.cuda.stream(torch.cuda.Stream()):
        y = torch.randn(4096, 4096, device=DEVICE)
        y = (y @ y).sign().abs()
        future = dist.all_reduce(y, async_op=True).get_future()
        future.wait()
        assert torch.all(y == size)


def same_as_the_cpu(rank: int) -> None:
    results = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        net = nn.parallel.DistributedDataParallel(nn.Linear(32, 8, dtype=torch.float64).to(device))
        x = torch.randn(16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        net(x.to(device)).square().mean().backward()
        results.append(net.module.weight.grad.cpu())
    torch.testing.assert_close(*results)


if __name__ == "__main__":
    dist.init_process_group(echelon.torch_backend.NAME)
    numbers(dist.get_rank(), dist.get_world_size())
    same_as_the_cpu(dist.get_rank())
    print(f"rank {dist.get_rank()}: right", flush=True)
    dist.destroy_process_group()
