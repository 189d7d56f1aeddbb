"""A plain torch program: DDP, FSDP2, tensor parallel and a pipeline over gloo and over ours, and the numbers of each.

python torch_forms.py FOLDER        with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, as torchrun does
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import echelon.torch_backend

NUM_STEPS = 3


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 16, generator=generator), torch.randn(6, 8, generator=generator)


def train(net, rank):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for step in range(NUM_STEPS):
        x, y = batch(step, rank)
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in net.named_parameters()}


def full(weights):
    return {name: getattr(p, "full_tensor", lambda p=p: p)().clone() for name, p in weights.items()}


def ddp(rank, size):
    return train(DistributedDataParallel(model()), rank)


def ddp_uneven(rank, size):
    """Ranks with different numbers of batches, and a comm hook that uses futures."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    net = DistributedDataParallel(model(1))
    net.register_comm_hook(None, fp16_compress_hook)
    with net.join():
        for step in range(2 + rank):
            nn.functional.mse_loss(net(batch(step, rank)[0]), batch(step, rank)[1]).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def ddp_powersgd(rank, size):
    """A comm hook whose callback waits for a further collective."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    net = DistributedDataParallel(model(5))
    net.register_comm_hook(
        PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), powerSGD_hook
    )
    for step in range(4):
        nn.functional.mse_loss(net(batch(step, rank)[0]), batch(step, rank)[1]).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def fsdp(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    net = model(2)
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return full(train(net, rank))


def tensor_parallel(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    net = parallelize_module(model(3), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return full(train(net, 0))


def pipeline(rank, size):
    whole = model(4)
    cut = {0: whole[:2], 1: whole[2:]}
    part = cut[rank]
    results = {}
    for kind in (ScheduleGPipe, Schedule1F1B):
        part.zero_grad()
        stage = PipelineStage(part, rank, size, torch.device("cpu"))
        schedule = kind(stage, n_microbatches=3, loss_fn=nn.functional.mse_loss)
        x, y = batch(0, 0)
        if rank == 0:
            schedule.step(x)
        else:
            losses = []
            schedule.step(target=y, losses=losses)
            results[f"{kind.__name__}.loss"] = torch.stack([loss.detach() for loss in losses])
        results |= {f"{kind.__name__}.{name}": p.grad.clone() for name, p in part.named_parameters()}
    return results


FORMS = (ddp, ddp_uneven, ddp_powersgd, fsdp, tensor_parallel, pipeline)


def main(folder):
    for backend in ("gloo", "echelon"):
        dist.init_process_group(backend)
        rank, size = dist.get_rank(), dist.get_world_size()
        assert dist.get_backend() == backend
        found = {}
        for form in FORMS:
            found |= {f"{form.__name__}/{name}": value for name, value in form(rank, size).items()}
        save_file({k: v.contiguous() for k, v in found.items()}, folder / f"{backend}-{rank}.safetensors")
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    assert echelon.torch_backend.NAME in dist.Backend.backend_list
    main(Path(sys.argv[1]))
