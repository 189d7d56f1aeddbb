"""What the training of a script's own models and optimizers takes in memory: counted from their shapes, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from echelon.errors import NoRoom
from echelon.mesh import allocator, limits, memory
from echelon.mesh.memory import Have, Tight, TooLarge, Training
from echelon.parallel.sharded import units
from echelon.parallel.sharded.split import tree
from echelon.strategy import Strategy


def training(
    models: Iterable[nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    ema: bool = False,
    unit_bytes: int = 0,
) -> Training:
    """Bytes of these models in training, with the units that sharded makes of them where `unit_bytes` are wanted. Optimizers that are not
    torch's own count for nothing: what is said is the least."""
    models = list(models)
    params = {id(p): p for model in models for p in model.parameters()}
    buffers = {id(b): b for model in models for b in model.buffers()}
    layers = (
        sum(_bytes(p) for p in module.parameters(recurse=False)) for m in models for module in m.modules()
    )
    whole = sum(map(_bytes, params.values()))
    return Training(
        parameters=whole,
        gradients=sum(_bytes(p) for p in params.values() if p.requires_grad),
        state=int(sum(_state(optimizer) for optimizer in optimizers)),
        other=sum(map(_bytes, buffers.values())) + whole * ema,
        largest=max(layers, default=0),
        unit=max((_unit(m, unit_bytes) for m in models), default=0) if unit_bytes else 0,
    )


def _unit(model: nn.Module, unit_bytes: int) -> int:
    return max(units.units(tree(model, set()), unit_bytes).values())


def require_room(found: Training, strategy: Strategy, workers: int, have: Have | None, base: int = 0) -> str:
    """Raises NoRoom when this cannot fit a worker, with what is missing and what would fit: before the kernel kills it for that.

    Gives a warning, or "", where it only may not fit."""
    if have is None:
        return ""
    give_back_if_short(found, strategy, workers, have, base)
    split = memory.split_of(strategy, workers)
    verdict = memory.judge(found, split, have, workers, str(strategy), base)
    if isinstance(verdict, TooLarge):
        raise NoRoom(verdict.message, remedy=verdict.remedy)
    return verdict.message if isinstance(verdict, Tight) else ""


def give_back_if_short(
    found: Training, strategy: Strategy, workers: int, have: Have | None, base: int, activations: int = 0
) -> bool:
    """Where there is no room for memory that is free and not given back, it is given back from now on."""
    need = memory.needed(found, memory.split_of(strategy, workers))
    if have is None or not memory.short(need, have, base, activations):
        return False
    return allocator.give_back_at_once()


def base(models: Iterable[nn.Module], device: torch.device) -> int:
    """Bytes that this process has without these models, where they lie; what the allocator holds free, which the training will take, is none of them."""
    if device.type != "cpu":
        return 0
    made = {id(t): t for m in models for t in (*m.parameters(), *m.buffers()) if not hasattr(t, "fake_mode")}
    return max(0, limits.held() - sum(map(_bytes, made.values())) - allocator.free_bytes())


def room(device: torch.device, run: str) -> Have | None:
    """What a worker may use where its model lies."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return Have(torch.cuda.get_device_properties(device).total_memory, f"the memory of {device} ({name})")
    return limits.have(run) if device.type == "cpu" else None


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _state(optimizer: torch.optim.Optimizer) -> float:
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind:
        return 0.0
    return sum(
        memory.state_copies(kind.__name__, group) * _bytes(p)
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad
    )
