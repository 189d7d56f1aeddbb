"""A model under fully_shard: which modules become units, what stays whole, and the script's old parameters, which are of no use any more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.errors import UsageError
from echelon.parallel.building import recipe
from echelon.parallel.local import is_split
from echelon.parallel.sharded import units as deciding
from echelon.parallel.sharded.owners import rows
from echelon.parallel.sharded.units import Node

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)  # fmt: skip


class Retired(nn.Parameter):
    """What a parameter that was made before prepare() becomes when the model is split: it has no values, and says so."""

    @property
    def grad(self) -> Any:
        raise UsageError(
            "this parameter was taken from the model before prepare(), which has split the model since",
            remedy="Take model.parameters() after run.prepare(model), and give prepare() every optimizer.",
        )

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None:
            raise UsageError("this parameter was taken from the model before prepare() split it")


@dataclass
class Split:
    """What became of a model."""

    units: list[Any]
    """fully_shard's states, the root's last; [] where nothing could be split."""
    whole: list[nn.Parameter]
    """Parameters that lie whole on every rank: single numbers, and tables whose gradients are rows."""
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)
    """id of the old parameter -> (itself, the one that the model has now)."""
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """id of the new parameter -> its whole shape."""


def device_mesh(ranks: Sequence[int], size: int, device: torch.device) -> Any:
    """torch's mesh over these ranks of the run, of which this is one. All of them call this in the same order."""
    from torch.distributed.device_mesh import DeviceMesh

    whole = len(ranks) == size
    group: Any = dist.group.WORLD if whole else dist.new_group(list(ranks), use_local_synchronization=True)
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=("shards",))


def split(
    model: nn.Module, mesh: Any, *, level: int, unit_bytes: int, sparse: set[int], known: set[int]
) -> Split:
    """Applies fully_shard to the model in place; of a recorded one this rank's parts are made then. `sparse`: ids of tables whose gradients are rows; `known`: those split with an earlier model."""
    from torch.distributed.fsdp import fully_shard

    root = getattr(model, "_orig_mod", model)
    stays = {p for p in root.parameters() if not _can_split(p) or id(p) in sparse or id(p) in known}
    stays |= _odd_types([p for p in root.parameters() if p not in stays])
    whole = [p for p in root.parameters() if p in stays and id(p) not in known]
    if all(p in stays for p in root.parameters()):
        recipe.fill(root, torch.device(mesh.device_type))
        return Split([], whole)
    made = Split([], whole)
    old = {
        (id(m), name): p
        for m in root.modules()
        for name, p in m.named_parameters(recurse=False)
        if p not in stays
    }
    for param in old.values():
        if not param.is_contiguous():
            param.data = param.data.contiguous()
    for name in deciding.units(tree(root, stays), unit_bytes):
        outer = not name
        module = root if outer else root.get_submodule(name)
        after = False if level < 3 else None if outer else True
        fully_shard(module, mesh=mesh, reshard_after_forward=after, ignored_params=stays)
        made.units.append(module._get_fsdp_state())  # type: ignore[operator]
    for module in root.modules():
        for name, param in module.named_parameters(recurse=False):
            before = old.get((id(module), name))
            if before is not None and before is not param and id(before) not in made.replaced:
                made.shapes[id(param)] = tuple(before.shape)
                made.replaced[id(before)] = (before, param)
    for before, param in made.replaced.values():
        _retire(before, param)
    recipe.fill(root, torch.device(mesh.device_type))
    made.units[-1]._lazy_init()  # now: else whichever module runs first would be the root
    root.register_forward_hook(_After(made.units))
    return made


def tree(root: nn.Module, stays: set[nn.Parameter]) -> Node:
    """The model as units.py sees it."""
    places: dict[int, int] = {}
    for _, module in root.named_modules(remove_duplicate=False):
        for param in module._parameters.values():
            if param is not None:
                places[id(param)] = places.get(id(param), 0) + 1
    numbers = {i: n for n, i in enumerate(i for i, count in places.items() if count > 1)}
    counted: set[int] = set()

    def node(module: nn.Module, name: str) -> Node:
        params = [p for p in module._parameters.values() if p is not None and p not in stays]
        fresh = [p for p in params if id(p) not in counted]
        counted.update(id(p) for p in fresh)
        runs = type(module).forward is not nn.Module.forward
        return Node(
            name,
            num_bytes=sum(p.numel() * p.element_size() for p in {id(p): p for p in fresh}.values()),
            children=tuple(
                node(child, f"{name}.{key}" if name else key)
                for key, child in module._modules.items()
                if child is not None
            ),
            runs=runs,
            lists=isinstance(module, (nn.ModuleList, nn.Sequential)) or not runs,
            opaque=type(module).__module__.startswith("torch.nn.") and not isinstance(module, CONTAINERS),
            ties=tuple(numbers[id(p)] for p in params if id(p) in numbers),
        )

    return node(root, "")


def repoint(optimizer: torch.optim.Optimizer, replaced: dict[int, tuple[nn.Parameter, nn.Parameter]]) -> None:
    """An optimizer made before prepare() steps the model's new parameters from now on; state that it has is cut like them."""
    for group in optimizer.param_groups:
        group["params"] = [replaced[id(p)][1] if id(p) in replaced else p for p in group["params"]]
    for param in [p for p in optimizer.state if id(p) in replaced]:
        optimizer.state[replaced[id(param)][1]] = optimizer.state.pop(param)
    for param, state in optimizer.state.items():
        if isinstance(param, Tensor) and is_split(param):
            for key, value in state.items():
                if isinstance(value, Tensor) and not is_split(value) and value.shape == param.shape:
                    state[key] = like(param, value)


def like(param: Any, value: Tensor) -> Tensor:
    """A whole tensor of a split parameter's shape, split like it."""
    from torch.distributed.tensor import DTensor

    mesh = param.device_mesh
    start, stop = rows(value.shape[0], mesh.size(), mesh.get_local_rank())
    part = value[start:stop].clone()
    return DTensor.from_local(
        part, mesh, param.placements, run_check=False, shape=value.shape, stride=value.stride()
    )


class _After:
    """A forward without gradients has no backward that would free what it gathered."""

    def __init__(self, units: Iterable[Any]) -> None:
        self.units = list(units)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            for unit in self.units:
                for part in groups_of(unit):
                    part.reshard()

    def __reduce__(self) -> Any:
        return _After, ([],)


def groups_of(unit: Any) -> list[Any]:
    """What fully_shard keeps of a unit: several groups from torch 2.13 on, one or none before."""
    found = getattr(unit, "_fsdp_param_groups", None)
    if found is None:
        found = [unit._fsdp_param_group] if unit._fsdp_param_group is not None else []
    return list(found)


def _can_split(param: Tensor) -> bool:
    return param.dim() > 0 and param.numel() > 0 and param.is_floating_point()


def _odd_types(params: list[nn.Parameter]) -> set[nn.Parameter]:
    """fully_shard gathers one type a unit: those of the types that have fewer bytes stay whole."""
    held: dict[torch.dtype, int] = {}
    for param in params:
        held[param.dtype] = held.get(param.dtype, 0) + param.nbytes
    most = max(held, key=lambda kind: held[kind], default=None)
    return {p for p in params if p.dtype != most}


def _retire(old: nn.Parameter, new: nn.Parameter) -> None:
    recorder = recipe.recorder_of(old)
    marks = recorder.marks if recorder is not None else set()
    for key, value in vars(old).items():
        if not key.startswith("_") and key not in marks:
            setattr(new, key, value)
    recipe.put(nn.Module(), old, recipe.placeholder(old))
    old.__class__ = Retired
