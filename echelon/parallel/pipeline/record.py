"""One forward of a model as a list of nodes: what trace.py writes, and what cut.py, plan.py, stage.py and measure.py read.

Every tensor of the forward is a value with a number; model inputs are values too, made by nobody. A node that writes into a value
makes a new value of it (`renames`), so that who needs what is always told by numbers. Parameters and buffers go by name.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Value:
    """Stands in arguments and outputs for a tensor that the forward made or was given."""

    number: int


@dataclass(frozen=True)
class Named:
    """Stands for the parameter or buffer of this name, looked up whenever the node runs."""

    name: str


@dataclass(frozen=True)
class Leaf:
    """A call of a module as a whole, through its `__call__`: its hooks run."""

    path: str


@dataclass(frozen=True)
class SetBuffer:
    """The forward put another tensor into a buffer (`self.mean = …`)."""

    path: str
    """Module and attribute, as the module has it."""


Autocast = tuple[tuple[str, bool, torch.dtype], ...]


@dataclass(frozen=True)
class Setting:
    """Under what a node runs, where that differs from what its stage runs under."""

    grad: bool = True
    """False: under torch.no_grad()."""

    autocast: Autocast | None = None
    """The state of autocast for each kind of device."""

    region: int = -1
    """Nodes of one call of torch.utils.checkpoint have the same number and are computed again in backward."""


@dataclass(frozen=True)
class Meta:
    """What is known of a value."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad: bool
    """A gradient may come back for it."""

    storage: int
    """Values with the same number lie in the same memory: one may be a view of the other."""

    maker: int
    """The place of its node, or -1 for a model input."""

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class Node:
    """One call: of a module of torch.nn, or of a torch function."""

    module: str
    """Full name of the module whose code made the call; of a Leaf its own."""

    call: Callable[..., Any] | Leaf | SetBuffer
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int | None, ...]
    """Values of the result's tensors, in order; None for a parameter, or for one that it wrote into."""

    renames: tuple[tuple[int, int], ...]
    """(old, new): it wrote into that tensor, which is `new` from here on."""

    names: tuple[str, ...]
    """Parameters and buffers that it may use."""

    writes: tuple[str, ...]
    """Those of them that it changes."""

    setting: Setting
    random: bool
    """It draws random numbers."""

    anchored: bool
    """It must be in the stage of what it takes: hooks of tensors."""

    flops: int
    """Floating-point operations of its forward, as far as known."""

    kept: int
    """Bytes that it alone leaves behind for backward."""

    where: str
    """File and line of the script's code that made the call."""

    free: bool = False
    """It follows from the model's inputs alone, costs little, and is computed wherever it is needed rather than sent."""

    @functools.cached_property
    def takes(self) -> tuple[int, ...]:
        used = [ref.number for ref in parts_of((self.args, self.kwargs), Value)]
        return tuple(dict.fromkeys([*(old for old, _ in self.renames), *used]))

    @functools.cached_property
    def flat(self) -> bool:
        """References stand only at the top of args: filled in without a walk."""
        inside = [part for part in self.args if not isinstance(part, (Value, Named))]
        return not parts_of((inside, self.kwargs), (Value, Named))

    @functools.cached_property
    def gives(self) -> tuple[int, ...]:
        return (*(number for number in self.outs if number is not None), *(new for _, new in self.renames))

    @property
    def label(self) -> str:
        if isinstance(self.call, Leaf):
            return self.call.path
        if isinstance(self.call, SetBuffer):
            return f"{self.call.path} = …"
        name = getattr(self.call, "__name__", str(self.call))
        return f"{self.module or 'model'}: {name}"


@dataclass(frozen=True)
class Record:
    """A forward, for inputs of certain shapes, in a certain mode."""

    nodes: tuple[Node, ...]
    values: tuple[Meta, ...]
    inputs: tuple[int, ...]
    """Values of the tensors among the model's inputs, in the order of (args, kwargs)."""

    output: Any
    """What the forward returned, with Value and Named for tensors."""

    pins: tuple[tuple[int, int], ...]
    """(first, last): these nodes and all between are in one stage, because they share memory that one of them writes to."""

    sizes: dict[str, int]
    """Bytes of every parameter and buffer, used or not; of one that is split over ranks, of this rank's part."""

    modules: dict[str, str]
    """Every name of a module -> the name under which its nodes stand (a module may have several)."""

    @functools.cached_property
    def outputs(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(ref.number for ref in parts_of(self.output, Value)))

    def shape_of_calls(self) -> tuple[tuple[str, str, bool], ...]:
        """Two records with the same are cut at the same places."""
        return tuple((node.module, node.label, node.free) for node in self.nodes)


def swap(fn: Callable[[Any], Any], tree: Any, kind: type | tuple[type, ...]) -> Any:
    """The tree with fn of everything of that kind; parts without any are the same objects."""
    if isinstance(tree, kind):
        return fn(tree)
    if isinstance(tree, Mapping):
        items = {key: swap(fn, value, kind) for key, value in tree.items()}
        if all(items[key] is value for key, value in tree.items()):
            return tree
        try:
            return type(tree)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    if isinstance(tree, (list, tuple)):
        parts = [swap(fn, part, kind) for part in tree]
        if all(new is old for new, old in zip(parts, tree, strict=True)):
            return tree
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if isinstance(tree, slice):
        ends = [swap(fn, end, kind) for end in (tree.start, tree.stop, tree.step)]
        return (
            tree
            if all(a is b for a, b in zip(ends, (tree.start, tree.stop, tree.step), strict=True))
            else slice(*ends)
        )
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        old = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if f.init}
        new = {name: swap(fn, value, kind) for name, value in old.items()}
        return tree if all(new[name] is old[name] for name in old) else dataclasses.replace(tree, **new)
    return tree


def tensors_of(tree: Any) -> list[Tensor]:
    """Every tensor of the tree, in order, as often as it stands there."""
    return parts_of(tree, Tensor)


def parts_of(tree: Any, kind: type[T] | tuple[type[T], ...]) -> list[T]:
    """Everything of that kind in the tree, in order."""
    found: list[T] = []

    def look(part: T) -> T:
        found.append(part)
        return part

    swap(look, tree, kind)
    return found
