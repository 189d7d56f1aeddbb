"""One worker of benchmarks/compress.py: learns a random teacher for some seconds, and notes the loss on held-out samples.

compress_worker.py OUT SECONDS SEED. The clock stands still while the loss is measured.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from models import mlp

import echelon

EVERY = 5
BATCH = 128


def task(seed: int) -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """Samples and held-out ones, labelled by a teacher that the student can match."""
    generator = torch.Generator().manual_seed(1000 + seed)
    teacher = nn.Sequential(nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 100))
    with torch.no_grad():
        for p in teacher.parameters():
            p.normal_(generator=generator).div_(p.shape[-1] ** 0.5)
        x = torch.randn(16384 + 1024, 256, generator=generator)
        y = teacher(x).argmax(1)
    return TensorDataset(x[:16384], y[:16384]), x[16384:], y[16384:]


def main() -> None:
    out, limit_s, seed = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    run = echelon.init(seed=seed)
    data, held_x, held_y = task(seed)
    torch.manual_seed(seed)
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, opt, loader = run.prepare(model, opt, loader)

    def held_out() -> float:
        with torch.no_grad():
            return float(F.cross_entropy(model(held_x), held_y))

    curve, spent_s, began = [(0.0, 0, held_out())], 0.0, 0.0
    for _ in run.epochs(10_000):
        for x, y in loader:
            began = began or time.perf_counter()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            if run.global_step % EVERY:
                continue
            spent_s += time.perf_counter() - began
            now_s = run.reduce(spent_s, "max")
            curve.append((now_s, run.global_step, held_out()))
            if now_s >= limit_s:
                break
            began = time.perf_counter()
        if curve[-1][0] >= limit_s:
            break
    traffic = run.machine.syncs[0].wire.traffic
    if run.is_main:
        said = {"curve": curve, "sent_bytes": traffic.sent_bytes, "plain_bytes": traffic.plain_bytes}
        out.write_text(json.dumps(said | {"params": sum(p.numel() for p in model.parameters())}))


main()
