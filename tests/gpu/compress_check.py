"""Compression on CUDA, run by hand on a machine with a GPU (without one it checks the CPU): prints what it saw, exits 1 if wrong.

echelon run --workers 2 tests/gpu/compress_check.py     two workers that share the GPU over gloo
echelon run --workers 3 tests/gpu/compress_check.py     … and code sums as well
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon import coding, faults
from echelon.comm.codecs.named import codec_for
from tests.runs import run_beside

CODECS = ["fp16", "bf16", "int8", "1bit", "topk:0.02", "powersgd:2"]


def codecs_agree(device):
    """The same bytes are the same bits on CPU and GPU, and NaN is seen on both."""
    torch.manual_seed(0)
    x = torch.randn(3, 4 * 4096)
    for text in CODECS[:-1]:
        codec = codec_for(coding.read(text))
        there = codec.encode(x.to(device))
        mine, other = codec.decode(there.cpu(), x.shape[1], x.dtype), codec.decode(there, x.shape[1], x.dtype)
        assert torch.equal(mine, other.cpu()), text
        assert torch.allclose(mine, codec.decode(codec.encode(x), x.shape[1], x.dtype), atol=1e-6), text
        bad = x.to(device).clone()
        bad[0, 3] = float("nan")
        assert not torch.isfinite(codec.decode(codec.encode(bad), x.shape[1], x.dtype)).all(), text


def learn(first, text, lost=()):
    faults.clear()
    for step in lost:
        faults.lose(step=step)
    run = run_beside(first, compress=text)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(256, 64, generator=g)
    y = (x[:, :8].sum(1) > 0).long()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(
        TensorDataset(x, y), batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(5)
    )
    model, opt, loader = run.prepare(model, opt, loader)
    for _ in run.epochs(4):
        for a, b in loader:
            F.cross_entropy(model(a.to(run.device)), b.to(run.device)).backward()
            opt.step()
            opt.zero_grad()
    loss = float(F.cross_entropy(model(x.to(run.device)), y.to(run.device)))
    return loss, torch.cat([p.detach().flatten() for p in model.parameters()]), run


def main():
    first = echelon.init()
    codecs_agree(first.device)
    plain, _, _ = learn(first, "none")
    for text in CODECS:
        loss, weights, run = learn(first, text)
        again, same, _ = learn(first, text, lost=(2, 5))
        every = run.gather(weights[None])
        equal = all(torch.equal(row, weights) for row in every)
        first.print(
            f"{text:12} on {first.device}: loss {loss:.4f} (none {plain:.4f}), same bits on ranks {equal}"
        )
        assert equal
        assert torch.equal(weights, same), "lost steps changed bits"
        assert again == loss
        assert loss < plain + 0.1


main()
