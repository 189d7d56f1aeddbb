"""CUDA paths, run by hand on a machine with a GPU (there is none where the tests run): prints what it saw, exits 1 if wrong.

python tests/gpu/cuda_check.py                      the world of one: device placement, NCCL, fp16 with scaling, replay
echelon run --workers 2 tests/gpu/cuda_check.py     two workers that share the GPU over gloo
"""

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon import faults
from tests.runs import group_of, run_beside, run_of_one


def data(dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(256, 64, generator=g, dtype=dtype), torch.randint(0, 10, (256,), generator=g)
    )


def net(dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)).to(dtype)


def loader(dtype=torch.float32):
    return DataLoader(
        data(dtype), batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(5), pin_memory=True
    )


def plain(dtype):
    model = net(dtype).cuda()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in loader(dtype):
        F.cross_entropy(model(x.cuda()), y.cuda()).backward()
        opt.step()
        opt.zero_grad()
    return {k: v.double().cpu() for k, v in model.state_dict().items()}


def train(run, dtype, fp16=False):
    model = net(dtype)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**32, growth_interval=3, enabled=fp16)
    model, opt, batches, scaler = run.prepare(model, opt, loader(dtype), scaler)
    assert next(model.parameters()).is_cuda
    for x, y in batches:
        assert x.device == run.device, x.device
        with torch.autocast("cuda", dtype=torch.float16, enabled=fp16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        run.log(loss=loss)
    return {k: v.double().cpu() for k, v in model.state_dict().items()}, scaler.get_scale()


def difference(a, b):
    return max(float((a[k] - b[k]).abs().max()) for k in a)


def main():
    first = echelon.init()
    print(f"rank {first.rank} of {first.world_size} on {first.device}: {torch.cuda.get_device_name()}, torch {torch.__version__}, "
          f"gradients over {type(group_of(first)).__name__}")  # fmt: skip
    reference = plain(torch.float64)

    def run_of(**fields):
        return run_beside(first, **fields)

    found = difference(train(run_of(), torch.float64)[0], reference)
    print(f"float64 against plain torch on the GPU: {found:.1e}")
    assert found < 1e-10
    calm, calm_scale = train(run_of(), torch.float32, fp16=True)
    faults.lose(step=2)
    faults.lose(step=4)
    stormy, stormy_scale = train(run_of(), torch.float32, fp16=True)
    print(
        f"fp16 with scaling: scale {calm_scale:g}; two steps lost on purpose: {difference(calm, stormy):.1e}"
    )
    assert calm_scale == stormy_scale < 2.0**32
    assert difference(calm, stormy) == 0.0
    if first.world_size == 1:
        nccl = run_of_one(backend="nccl")
        found = difference(train(nccl, torch.float64)[0], reference)
        print(f"NCCL world of one: {type(group_of(nccl)).__name__}, {found:.1e}")
        assert found < 1e-10
        speed(run_of())
    print("all well")


def speed(run):
    """A plain loop beside the prepared one, alternating, on one GPU."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(
            *[m for _ in range(8) for m in (nn.Linear(2048, 2048), nn.GELU())], nn.Linear(2048, 10)
        )

    x, y = torch.randn(512, 2048, device="cuda"), torch.randint(0, 10, (512,), device="cuda")
    ours, theirs = make(), make().cuda()
    opt_a, opt_b = torch.optim.AdamW(ours.parameters(), 1e-4), torch.optim.AdamW(theirs.parameters(), 1e-4)
    ours, opt_a = run.prepare(ours, opt_a)

    def steps(model, opt):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(30):
            F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / 30

    ratios = []
    for _ in range(23):
        a, b = steps(ours, opt_a), steps(theirs, opt_b)
        ratios.append(b / a)
    ratios = sorted(ratios[3:])
    print(f"plain loop / prepared loop on one GPU: median {ratios[10]:.3f}, lower quartile {ratios[5]:.3f}")


main()
