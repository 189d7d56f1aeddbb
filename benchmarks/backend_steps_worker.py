"""One rank of backend_steps.py: a plain PyTorch program that trains one model twice, over gloo and over echelon, in turn.

Run as `python backend_steps_worker.py RANK RANKS FOLDER FORM MODEL ROUNDS`; rank 0 leaves FOLDER/times.json.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
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
import turns
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


def stepper(kind: str, name: str, group: dist.ProcessGroup) -> turns.Step:
    model, x, y = whole(name)
    model = FORMS[kind](model, group)
    return turns.stepper(model, torch.optim.SGD(model.parameters(), lr=0.001), x, y)


def main() -> None:
    rank, ranks, folder, kind, name, rounds = (*map(int, sys.argv[1:3]), *sys.argv[3:6], int(sys.argv[6]))
    torch.set_num_threads(max(1, cores() // ranks))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=LIMIT
    )
    groups = {side: dist.new_group(backend=side, timeout=LIMIT) for side in SIDES}
    steps = {side: stepper(kind, name, group) for side, group in groups.items()}
    losses = {side: [step().item() for _ in range(4)] for side, step in steps.items()}
    begun = groups["echelon"].num_begun
    steps["gloo"]()
    assert groups["echelon"].num_begun == begun, "steps over gloo went over echelon"
    steps["echelon"]()
    assert kind == "tensor" or groups["echelon"].num_begun > begun, "steps over echelon went over gloo"
    count = turns.steps_a_round(steps["gloo"], ROUND_S)
    turns.steps_a_round(steps["echelon"], ROUND_S)  # as many steps so far as the other side
    found = turns.in_turn(steps, rounds, count)
    turns.tell(Path(folder), found, steps_a_round=count, same_losses=turns.alike(losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
