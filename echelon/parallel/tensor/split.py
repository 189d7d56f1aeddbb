"""Splits a model, or a copy of a part of it, as a plan says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from echelon.parallel.tensor.heads import Heads
from echelon.parallel.tensor.layers import (
    Channels,
    ChannelsIn,
    ChannelsOut,
    Column,
    Layer,
    Row,
    Vocab,
    parameter,
    taken,
)
from echelon.parallel.tensor.meet import Axis
from echelon.parallel.tensor.pieces import Piece, dealt, piece
from echelon.parallel.tensor.region import Region
from echelon.parallel.tensor.words import Option, Way

KINDS: dict[str, type[Layer]] = {
    "column": Column,
    "gather": Column,
    "row": Row,
    "vocab": Vocab,
    "heads": Heads,
    "channels out": ChannelsOut,
    "channels in": ChannelsIn,
    "channels": Channels,
}


@dataclass
class Pieces:
    """What was split: a parameter's piece by its id, with the parameter kept alive."""

    by_param: dict[int, tuple[nn.Parameter, Piece]] = field(default_factory=dict)
    buffers: dict[str, Piece] = field(default_factory=dict)
    """Of buffers, by their names in the model."""

    def of(self, param: object) -> Piece | None:
        found = self.by_param.get(id(param))
        return found[1] if found is not None else None


def split(model: nn.Module, path: str, option: Option, axis: Axis, pieces: Pieces) -> None:
    """Splits one block of `model`, whose own module is at `path`. Modules are found by their paths in the model."""
    uneven = any(way.units % axis.size for way in option.ways)
    region = Region(axis, uneven or _may_draw(model.get_submodule(path)))
    for way in option.ways:
        _layer(model, way, axis, region, pieces)
    units = option.ways[0].units if option.ways else 1
    first, last = dealt(units, axis.size, axis.rank)
    for name in option.numbers:
        inner, _, last_name = name.rpartition(".")
        owner: Any = model.get_submodule(".".join(filter(None, (path, inner))))
        setattr(owner, last_name, getattr(owner, last_name) // units * (last - first))
    for name in option.partial:
        parameter(model, name).register_hook(axis.summed)


def _may_draw(owner: nn.Module) -> bool:
    """Does something in a block say that it drops values?"""
    drops = [m for m in owner.modules() if isinstance(m, _DropoutNd)]
    named = [v for m in owner.modules() for n, v in vars(m).items() if "drop" in n and type(v) is float]
    return any(value > 0 for value in [*named, *(m.p for m in drops)])


def _layer(model: nn.Module, way: Way, axis: Axis, region: Region, pieces: Pieces) -> None:
    module = model.get_submodule(way.path)
    layer = KINDS[way.kind](module, way, axis, region)
    for name, (dim, packed) in layer.cuts().items():
        param = parameter(module, name)
        if pieces.of(param) is None:  # a tied weight is cut once
            mine = piece(tuple(param.shape), dim, way.units, packed, axis.size, axis.rank)
            param.data = taken(param.data, mine)
            param.grad = None
            pieces.by_param[id(param)] = (param, mine)
    for name in layer.buffers():
        whole = module._buffers[name]
        assert whole is not None
        mine = piece(tuple(whole.shape), 0, way.units, 1, axis.size, axis.rank)
        module._buffers[name] = taken(whole, mine)
        pieces.buffers[f"{way.path}.{name}" if way.path else name] = mine
    layer.shrink()
    if layer.installs:
        module.__dict__["forward"] = layer


def guarded(model: nn.Module, pieces: Pieces) -> dict[int, str]:
    """Names of split parameters by their id: those whose layers' forwards are ours, which nobody else should use."""
    found: dict[int, str] = {}
    for path, module in model.named_modules():
        if isinstance(vars(module).get("forward"), Layer):
            at = f"{path}." if path else ""
            found |= {id(p): at + name for name, p in module.named_parameters() if pieces.of(p) is not None}
    return found


def no_shortcuts(model: nn.Module) -> None:
    """torch's transformer layers have a way for evaluation that takes weights out of their modules: not where these are pieces."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = module.use_nested_tensor and not _has_pieces(module)
        elif isinstance(module, nn.TransformerEncoderLayer) and _has_pieces(module):
            module.linear1.register_forward_pre_hook(_nothing)


def _has_pieces(module: nn.Module) -> bool:
    return any(isinstance(vars(inner).get("forward"), Layer) for inner in module.modules())


def _nothing(module: nn.Module, args: object) -> None:
    """Where a module has hooks, torch takes the way through its modules."""
