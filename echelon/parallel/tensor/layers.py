"""Split layers: forwards that stand on the instance in place of the class's own, and the pieces of their parameters.

Modules, parameters and names stay what they were; a parameter's data is this worker's piece. A copy of a split module is split as well.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.parallel.tensor import guard, meet
from echelon.parallel.tensor.meet import Axis
from echelon.parallel.tensor.outputs import Uses, deal
from echelon.parallel.tensor.pieces import Piece, dealt
from echelon.parallel.tensor.region import Region
from echelon.parallel.tensor.words import Way


class Layer:
    """The forward of a split module."""

    installs = True
    """Whether the module's forward is replaced by this."""

    def __init__(self, module: Any, way: Way, axis: Axis, region: Region) -> None:
        self.module, self.way, self.axis, self.region = module, way, axis, region

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        return type(self)(memo[id(self.module)], self.way, self.axis, self.region.__deepcopy__(memo))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return guard.layer(self.forward, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the class's own."""
        raise NotImplementedError

    def cuts(self) -> dict[str, tuple[int, int]]:
        """By a parameter's name: the dimension along which it is dealt, and how many are packed into it."""
        raise NotImplementedError

    def buffers(self) -> tuple[str, ...]:
        """Names of buffers that are dealt as the parameters are, along their first dimension."""
        return ()

    def shrink(self) -> None:
        """Sizes that the module tells of itself become this worker's."""


def weight_of(module: Any) -> Tensor:
    """Of a linear layer, as (output features, input features)."""
    weight: Tensor = module.weight
    return weight.t() if hasattr(module, "nf") else weight


class Column(Layer):
    """Output features are dealt. Inside a block the output stays as it is here; else the workers' are gathered, when somebody reads it."""

    def __init__(self, module: Any, way: Way, axis: Axis, region: Region) -> None:
        super().__init__(module, way, axis, region)
        self.uses = Uses(way.path)

    def forward(self, input: Tensor) -> Tensor:
        module, way = self.module, self.way
        if way.inside:
            return F.linear(self.region.enter(input, module.training), weight_of(module), module.bias)
        y = F.linear(meet.copy(input, self.axis), weight_of(module), module.bias)
        if self.defers(y):
            return deal(y, self.axis, way.units, self.uses)
        return meet.gather(y, self.axis, y.dim() - 1, way.units)

    def defers(self, y: Tensor) -> bool:
        """Is the output gathered when it is read, which a cross-entropy does not? Where gradients are wanted, and while that pays."""
        wanted = self.axis.reads is not None and self.way.kind == "column" and self.uses.pays
        return wanted and y.requires_grad and torch.is_grad_enabled() and not meet.shape_only(y)

    def cuts(self) -> dict[str, tuple[int, int]]:
        found = {"weight": (1 if hasattr(self.module, "nf") else 0, self.way.packed)}
        return found if self.module.bias is None else found | {"bias": (0, self.way.packed)}

    def shrink(self) -> None:
        if self.way.inside:
            name = "nf" if hasattr(self.module, "nf") else "out_features"
            setattr(self.module, name, weight_of(self.module).shape[0])


class Row(Layer):
    """Input features are dealt: the workers' outputs are added, and then, once, the bias."""

    def forward(self, input: Tensor) -> Tensor:
        module, way = self.module, self.way
        if way.inside:
            self.region.leave(input)
        else:
            input = meet.cut(input, self.axis, input.dim() - 1, way.units)
        y: Tensor = meet.add(F.linear(input, weight_of(module)), self.axis)
        return y if module.bias is None else torch.add(y, module.bias.to(y.dtype))

    def cuts(self) -> dict[str, tuple[int, int]]:
        return {"weight": (0 if hasattr(self.module, "nf") else 1, 1)}

    def shrink(self) -> None:
        if self.way.inside and not hasattr(self.module, "nf"):
            self.module.in_features = self.module.weight.shape[1]


class Vocab(Layer):
    """Entries of a table are dealt: each worker looks up those that it has, the others are zeros, and all are added."""

    def forward(self, input: Tensor) -> Tensor:
        module, (first, last) = self.module, dealt(self.way.units, self.axis.size, self.axis.rank)
        elsewhere = (input < first) | (input >= last)
        padding = module.padding_idx
        here = padding - first if padding is not None and first <= padding < last else None
        ids = (input - first).masked_fill(elsewhere, 0)
        found = F.embedding(ids, module.weight, here, scale_grad_by_freq=False)
        return meet.add(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.axis)

    def cuts(self) -> dict[str, tuple[int, int]]:
        return {"weight": (0, 1)}


class ChannelsOut(Layer):
    """A convolution whose output channels are dealt; always in a block."""

    def forward(self, input: Tensor) -> Tensor:
        module = self.module
        x = self.region.enter(input, module.training)
        return module._conv_forward(x, module.weight, module.bias)  # type: ignore[no-any-return]

    def cuts(self) -> dict[str, tuple[int, int]]:
        return {"weight": (0, 1)} if self.module.bias is None else {"weight": (0, 1), "bias": (0, 1)}

    def shrink(self) -> None:
        self.module.out_channels = self.module.weight.shape[0]


class ChannelsIn(Layer):
    """A convolution whose input channels are dealt: the workers' outputs are added, and then, once, the bias."""

    def forward(self, input: Tensor) -> Tensor:
        module = self.module
        self.region.leave(input)
        y = meet.add(module._conv_forward(input, module.weight, None), self.axis)
        if module.bias is None:
            return y
        return torch.add(y, module.bias.to(y.dtype).view(-1, *[1] * (module.weight.dim() - 2)))

    def cuts(self) -> dict[str, tuple[int, int]]:
        return {"weight": (1, 1)}

    def shrink(self) -> None:
        self.module.in_channels = self.module.weight.shape[1]


class Channels(Layer):
    """A BatchNorm of channels that are dealt: what it knows of each lies with it. Its own forward stays."""

    installs = False

    def cuts(self) -> dict[str, tuple[int, int]]:
        return {name: (0, 1) for name in ("weight", "bias") if getattr(self.module, name) is not None}

    def buffers(self) -> tuple[str, ...]:
        return tuple(n for n in ("running_mean", "running_var") if getattr(self.module, n) is not None)

    def shrink(self) -> None:
        first, last = dealt(self.way.units, self.axis.size, self.axis.rank)
        self.module.num_features = last - first


@torch.no_grad()
def taken(whole: Tensor, piece: Piece) -> Tensor:
    """This worker's elements of a whole tensor, in memory of their own."""
    parts: Tensor = whole.unflatten(piece.dim, (piece.packed, piece.shape[piece.dim] // piece.packed))  # type: ignore[no-untyped-call]
    mine = parts.narrow(piece.dim + 1, piece.first, piece.last - piece.first)
    return mine.reshape(piece.local_shape).clone()


def parameter(module: nn.Module, name: str) -> nn.Parameter:
    """`out_proj.weight` of a module."""
    path, _, last = name.rpartition(".")
    found = module.get_submodule(path)._parameters[last]
    assert found is not None
    return found
