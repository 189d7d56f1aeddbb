"""One rank of backend_steps.py: a plain PyTorch program that trains one model twice, over gloo and over echelon, in turn.

Run as `python backend_steps_worker.py RANK RANKS FOLDER FORM MODEL ROUNDS`; rank 0 leaves FOLDER/times.json.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import echelon.torch_backend  # noqa: F401  (registers the backend)
from echelon.parallel.tensor import form

sys.path.insert(0, str(Path(__file__).parent))
import models
from record import cores

LIMIT = timedelta(seconds=60)
ROUND_S = 0.2
"""Steps of one side last about this long in a round."""
SIDES = ("gloo", "echelon")


def whole(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """(the model, a batch of this rank, its targets); the same on every rank and both sides."""
    torch.manual_seed(0)
    if name == "tables-25m":
        return models.tables(), torch.randint(0, models.ROWS, (32, 8)), torch.randint(0, 64, (32,))
    if name == "wide-25m":
        return models.wide(), torch.randn(2, 2048), torch.randint(0, 2048, (2,))
    if name == "narrow":
        return models.narrow(), torch.randn(512, 1024), torch.randint(0, 1024, (512,))
    if name == "blocks":
        return models.blocks(), torch.randn(128, 1024), torch.randint(0, 1024, (128,))
    model, data, batch, _ = models.case(name)
    return model, data.tensors[0][:batch], data.tensors[1][:batch]


def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    """Meshes are equal whatever carries them, and DTensor keeps its plans by mesh: only another name makes it use this group."""
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(dist.get_backend(group),))


def ddp(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


def fsdp2(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Each layer of the model's own list, then what is left."""
    mesh = mesh_of(group)
    layers = model.body.layers if isinstance(model, models.Transformer) else model
    for layer in layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tp(model: nn.Module, group: dist.ProcessGroup, tokens_split: bool = False) -> nn.Module:
    """Pairs of linears: the first by columns, the second by rows. What is between pairs is whole on every rank, or each has its
    tokens (sequence parallel): then a pair gathers before and reduce-scatters behind."""
    if isinstance(model, models.Transformer):
        pairs = [
            (f"body.layers.{i}.linear1", f"body.layers.{i}.linear2") for i in range(len(model.body.layers))
        ]
    elif isinstance(model[0], models.Pair):
        pairs = [(f"{i}.up", f"{i}.down") for i in range(len(model))]
    else:
        pairs = [("0", "2")]
    among = Shard(0) if tokens_split else Replicate()
    plan = {up: ColwiseParallel(input_layouts=among) for up, _ in pairs}
    plan |= {down: RowwiseParallel(output_layouts=among) for _, down in pairs}
    return parallelize_module(model, mesh_of(group), plan)


def tensor(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """The same pairs by PyTorch's own tensor parallel over gloo, and by the run's (`tensor=T`) over ours."""
    if dist.get_backend(group) == "gloo":
        return tp(model, group)
    ours = group.group  # type: ignore[attr-defined]
    layers = {path for path, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)}
    layers |= {"embed", "out"} & {path for path, _ in model.named_modules()}
    form.share(
        model,
        ours,
        ours,
        lambda lost: sys.exit(str(lost)),
        "+".join(f"{path}:whole" for path in sorted(layers)),
    )
    return model


FORMS = {"ddp": ddp, "fsdp2": fsdp2, "tp": tp, "tp-seq": partial(tp, tokens_split=True), "tensor": tensor}


def stepper(kind: str, name: str, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    model, x, y = whole(name)
    model = FORMS[kind](model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    def step() -> Tensor:
        out = model(x)
        loss = F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def steps_a_round(step: Callable[[], Tensor]) -> int:
    """Rank 0's count, for all."""
    spent = []
    for _ in range(5):
        began = time.perf_counter()
        step()
        spent.append(time.perf_counter() - began)
    count = [min(200, math.ceil(ROUND_S / statistics.median(spent)))]
    dist.broadcast_object_list(count)
    return count[0]


def main() -> None:
    rank, ranks, folder, kind, name, rounds = (*map(int, sys.argv[1:3]), *sys.argv[3:6], int(sys.argv[6]))
    torch.set_num_threads(max(1, cores() // ranks))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=LIMIT
    )
    groups = {side: dist.new_group(backend=side, timeout=LIMIT) for side in SIDES}
    steps = {side: stepper(kind, name, group) for side, group in groups.items()}
    losses = {side: [step().item() for _ in range(4)] for side, step in steps.items()}
    alike = all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(*losses.values(), strict=True))
    begun = groups["echelon"].num_begun
    steps["gloo"]()
    assert groups["echelon"].num_begun == begun, "steps over gloo went over echelon"
    steps["echelon"]()
    assert kind == "tensor" or groups["echelon"].num_begun > begun, "steps over echelon went over gloo"
    count = steps_a_round(steps["gloo"])
    steps_a_round(steps["echelon"])  # as many steps so far as the other side
    mine: dict[str, list[float]] = {side: [] for side in SIDES}
    order = random.Random(0)
    for _ in range(rounds):
        for side in order.sample(SIDES, 2):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(count):
                steps[side]()
            mine[side].append((time.perf_counter() - began) / count)
    # a round took as long as its slowest rank
    everyone: list[dict[str, list[float]]] = [{} for _ in range(ranks)]
    dist.all_gather_object(everyone, mine)
    times = {
        side: [max(values) for values in zip(*(of[side] for of in everyone), strict=True)] for side in SIDES
    }
    if rank == 0:
        found = {
            "times": times,
            "steps_a_round": count,
            "same_losses": alike,
            "threads": torch.get_num_threads(),
        }
        (Path(folder) / "times.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
