"""offload: an optimizer's state lies in host memory, and its step is computed there, on copies of what this rank steps.

1. down: parameters that have a gradient, and the gradients, are copied to the host
2. step: the optimizer's own, over the copies; state that is elsewhere (it was just loaded) comes along
3. up: the new values are copied back; the state stays, under the script's parameters
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echelon.errors import StrategyError
from echelon.parallel.local import local
from echelon.parallel.sharded.parts import BY_ELEMENT

HOST = torch.device("cpu")


class Hosted:
    """Stands around an optimizer's own step. Blocks until the values are back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if type(optimizer) not in BY_ELEMENT:
            raise StrategyError(
                f"offload with {type(optimizer).__name__}: it is not known to step each element by itself, and its step would see copies of parts",
                remedy="Leave offload out, or use one of torch's own: SGD, Adam, AdamW, …",
            )
        self.optimizer = optimizer

    def step(
        self, params: Sequence[Tensor], inner: Callable[..., Any], closure: Callable[[], Any] | None = None
    ) -> Any:
        result = None
        if closure is not None:  # these optimizers call it once, first
            with torch.enable_grad():
                result = closure()
        optimizer = self.optimizer
        groups, state = [(g, g["params"]) for g in optimizer.param_groups], optimizer.state
        # down
        copies = {id(p): _down(p) for p in params if p.grad is not None}
        here: defaultdict[Any, Any] = defaultdict(dict)
        moved = [p for p in params if id(p) in copies]
        for param in moved:
            if param in state:
                here[copies[id(param)]] = {k: _home(v) for k, v in state[param].items()}
        # step
        try:
            optimizer.state = here
            for group, whole in groups:
                group["params"] = [copies[id(p)] for p in whole if id(p) in copies]
            inner()
        finally:
            optimizer.state = state
            for group, whole in groups:
                group["params"] = whole
        # up
        with torch.no_grad():
            for param in moved:
                copy = copies[id(param)]
                local(param.detach()).copy_(copy)
                if copy in here:
                    state[param] = here[copy]
        return result


def _down(param: Tensor) -> nn.Parameter:
    assert param.grad is not None
    with torch.no_grad():
        copy = nn.Parameter(local(param.detach()).to(HOST, copy=True))
        copy.grad = local(param.grad.detach()).to(HOST)
    return copy


def _home(value: Any) -> Any:
    return local(value).to(HOST) if isinstance(value, Tensor) else value
