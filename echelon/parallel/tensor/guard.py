"""Does the script use a split parameter outside of its layer? Watched in a model's first forward.

`F.linear(x, self.embed.weight)` as output layer would see a piece of the table where it means all of it. The first forward runs under a mode
of torch that sees every function with its arguments; later ones run without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from echelon.errors import StrategyError


class _Depth(threading.local):
    layers = 0


_inside = _Depth()


def layer(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the forward of a split layer: it may use its own parameters."""
    _inside.layers += 1
    try:
        return fn(*args, **kwargs)
    finally:
        _inside.layers -= 1


class Guard(TorchFunctionMode):
    """One a model. `names` are the split parameters' by their id."""

    def __init__(self, model: nn.Module, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.entered = False
        self.hooks = [
            model.register_forward_pre_hook(self._before),
            model.register_forward_hook(self._after, always_call=True),
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        return self  # its hooks in a copy do nothing: it watches one forward of the model that was split

    def __reduce__(self) -> Any:
        return _no_guard, ()

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and self.hooks and not self.entered:
            self.entered = True
            self.__enter__()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.entered and self.hooks:
            for hook in self.hooks:
                hook.remove()
            self.hooks = []
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not _inside.layers and _computed(out):
            for value in (*args, *(kwargs or {}).values()):
                if isinstance(value, Tensor) and id(value) in self.names:
                    raise misused(self.names[id(value)], getattr(func, "__name__", str(func)))
        return out


def misused(name: str, function: str) -> StrategyError:
    """The error for a split parameter that the model's own code uses."""
    layer_name = name.rpartition(".")[0]
    return StrategyError(
        f"`{name}` is split over the workers of the tensor axis, and the model's own code uses it ({function})\n"
        "  That code would see this worker's piece where it means the whole.",
        remedy=f"Keep it whole: --set tensor_plan={layer_name}:whole. A weight that two layers share by assignment "
        "(head.weight = embed.weight) may be split.",
    )


def _computed(out: Any) -> bool:
    """A tensor that gradients flow through."""
    if isinstance(out, Tensor):
        return out.grad_fn is not None
    return isinstance(out, (tuple, list)) and any(_computed(value) for value in out)


def _no_guard() -> Callable[..., None]:
    return _nothing


def _nothing(*args: Any) -> None:
    return None
