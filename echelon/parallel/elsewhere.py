"""Gradients whose sum is on a server (apply=server): what stands in `.grad` between backward and step.

Such a gradient has no global value here. Whoever computes with it would silently compute with a part: any operation on it raises,
names the parameter and says what to call instead. `is None` tells, as usual, whether there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echelon.errors import StrategyError, UsageError
from echelon.parallel.buckets import Slot
from echelon.ps.recipes import Recipe

_ALLOWED = {
    "shape", "dtype", "device", "layout", "is_sparse", "requires_grad", "grad_fn", "is_leaf", "names", "ndim", "size", "dim",
    "numel", "__hash__", "is_cuda", "is_floating_point", "is_complex", "is_contiguous", "stride", "element_size", "__len__", "data_ptr",
    "storage_offset", "is_quantized", "itemsize", "nbytes", "is_mkldnn", "is_meta", "_version",
}  # fmt: skip
"""What can be asked about a gradient without its numbers."""


class OnServers(Tensor):
    """Has the parameter's shape and type, and no numbers."""

    echelon_name: str

    @classmethod
    def of(cls, name: str, param: Tensor) -> OnServers:
        hollow = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)
        made = torch.Tensor._make_subclass(cls, hollow)
        made.echelon_name = name
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        asked = getattr(func, "__name__", "")
        if asked == "__get__":
            asked = getattr(getattr(func, "__self__", None), "__name__", "")
        if asked in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise not_here(_name(args))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<gradient of {self.echelon_name}, on the servers>"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def check_held(params: Sequence[tuple[str, nn.Parameter, bool]]) -> None:
    """Can servers hold all of these (name, parameter, has sparse gradients)?"""
    for name, param, is_sparse in params:
        if is_sparse:
            raise StrategyError(
                f"`{name}` has sparse gradients, and servers keep dense ranges",
                remedy="Use apply=worker, or sparse=False in the embedding.",
            )
        if param.dtype not in (torch.float32, torch.float64):
            raise StrategyError(
                f"`{name}` is {str(param.dtype).removeprefix('torch.')}: servers know float32 and float64",
                remedy="Use apply=worker, or keep the weights in float32 and compute in other types with autocast.",
            )


def not_here(name: str) -> UsageError:
    """For whoever reads, changes or replaces a gradient between backward and step."""
    return UsageError(
        f"the gradient of {name} is not here: with apply=server the parts of all workers meet on the servers",
        remedy="Clip with run.clip_grad_norm(model, max_norm) or clip_norm=…; for any other work on gradients use "
        "apply=worker, where .grad is global.",
    )


def _name(args: Any) -> str:
    for arg in args if isinstance(args, tuple | list) else ():
        if isinstance(arg, OnServers):
            return f"`{arg.echelon_name}`"
        if isinstance(arg, tuple | list):
            found = _name(arg)
            if found != "a parameter":
                return found
    return "a parameter"


def by_factor(
    groups: Iterable[tuple[Recipe, Iterable[Slot]]], factors: dict[int, float]
) -> tuple[list[tuple[Recipe, float, list[str]]], list[str]]:
    """What servers are told of a step: names by recipe and by what clipping multiplies their gradients with, and those that have none.
    `factors` (slot -> factor) are used up."""
    stepping: list[tuple[Recipe, float, list[str]]] = []
    unused: list[str] = []
    for recipe, slots in groups:
        named: dict[float, list[str]] = {}
        for slot in slots:
            if slot.param.grad is not None:
                if not isinstance(slot.param.grad, OnServers):  # replaced since it met
                    raise not_here(f"`{slot.name}`")
                named.setdefault(factors.pop(slot.index, 1.0), []).append(slot.name)
            elif slot.bucket is not None:
                unused.append(slot.name)
        stepping += [(recipe, factor, names) for factor, names in named.items()]
    return stepping, unused
