"""One worker of sharded_step.py, started by `echelon run`: one model under `sharded` and as plain PyTorch code over gloo, in turn.

sharded_step_worker.py FOLDER MODEL LEVEL ROUNDS; rank 0 leaves FOLDER/times.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import echelon
from echelon.parallel.sharded.split import tree
from echelon.parallel.sharded.units import units

sys.path.insert(0, str(Path(__file__).parent))
import turns
from backend_steps_worker import whole

ROUND_S = 0.3


def plain(name: str, level: int, group: dist.ProcessGroup, unit_bytes: int) -> turns.Step:
    """What somebody would write: ZeRO over DDP, or fully_shard over the very same modules."""
    model, x, y = whole(name)
    if level == 1:
        model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        return turns.stepper(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, lr=1e-4), x, y)  # fmt: skip
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(dist.get_backend(group),))
    for unit in units(tree(model, set()), unit_bytes):
        fully_shard(model.get_submodule(unit), mesh=mesh, reshard_after_forward=None if level == 3 else False)
    return turns.stepper(model, torch.optim.AdamW(model.parameters(), lr=1e-4), x, y)


def main() -> None:
    folder, name, level, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    run = echelon.init()
    unit_bytes = int(run.strategy.wrap_mib * 2**20)
    model, x, y = whole(name)
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    sides = {
        "echelon": turns.stepper(model, optimizer, x, y),
        "gloo": plain(name, level, dist.new_group(backend="gloo"), unit_bytes),
    }
    if level > 1:  # fully_shard as it is, over our backend of torch.distributed
        sides["backend"] = plain(name, level, dist.new_group(backend="echelon"), unit_bytes)
    losses = {side: [step().item() for _ in range(5)] for side, step in sides.items()}
    count = turns.steps_a_round(sides["gloo"], ROUND_S, most=50)
    for side in sides:
        if side != "gloo":  # as many steps so far
            turns.steps_a_round(sides[side], ROUND_S)
    found = turns.in_turn(sides, rounds, count)
    turns.tell(folder, found, steps_a_round=count, same_losses=turns.alike(losses, within=1e-3))


main()
