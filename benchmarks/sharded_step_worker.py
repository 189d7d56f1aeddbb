"""One worker of sharded_step.py, started by `echelon run`: one model under `sharded` and as plain PyTorch code over gloo, in turn.

sharded_step_worker.py FOLDER MODEL LEVEL ROUNDS; rank 0 leaves FOLDER/times.json.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import echelon
from echelon.parallel.sharded.split import tree
from echelon.parallel.sharded.units import units

sys.path.insert(0, str(Path(__file__).parent))
from backend_steps_worker import whole

ROUND_S = 0.4


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        out = model(x)
        loss = F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def plain(name: str, level: int, group: dist.ProcessGroup, unit_bytes: int) -> Callable[[], Tensor]:
    """What somebody would write: ZeRO over DDP, or fully_shard over the very same modules."""
    model, x, y = whole(name)
    if level == 1:
        model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        return stepper(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, lr=1e-4), x, y)  # fmt: skip
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(dist.get_backend(group),))
    for unit in units(tree(model, set()), unit_bytes):
        fully_shard(model.get_submodule(unit), mesh=mesh, reshard_after_forward=None if level == 3 else False)
    return stepper(model, torch.optim.AdamW(model.parameters(), lr=1e-4), x, y)


def main() -> None:
    folder, name, level, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    run = echelon.init()
    unit_bytes = int(run.strategy.wrap_mib * 2**20)
    model, x, y = whole(name)
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    sides = {
        "echelon": stepper(model, optimizer, x, y),
        "gloo": plain(name, level, dist.new_group(backend="gloo"), unit_bytes),
    }
    if level > 1:  # fully_shard as it is, over our backend of torch.distributed
        sides["backend"] = plain(name, level, dist.new_group(backend="echelon"), unit_bytes)
    losses = {side: [step().item() for _ in range(5)] for side, step in sides.items()}
    began = time.perf_counter()
    sides["gloo"]()
    count = int(run.reduce(torch.tensor(ROUND_S / (time.perf_counter() - began)), "min").clamp(1, 50))
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in random.Random(number).sample(sorted(sides), len(sides)):
            run.reduce(0.0)  # all begin together
            began = time.perf_counter()
            for _ in range(count):
                sides[side]()
            times[side].append(float(run.reduce((time.perf_counter() - began) / count, "max")))
    if run.is_main:
        (folder / "times.json").write_text(json.dumps({"times": times, "losses": losses, "steps": count}))


main()
