"""Levels 2 and 3: an optimizer that treats every element by itself steps on this rank's parts as plain tensors.

DTensors cost tens of microseconds an operation, and an optimizer does a dozen for each parameter. Optimizers that look at whole tensors
(norms of layers, matrices) or are not torch's own step on the DTensors, whose operations are global.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echelon.parallel.local import is_split, local

BY_ELEMENT = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Rprop,
)


class Parts:
    """Runs an optimizer's own step on what is here. Its state stays under the script's parameters, as this rank's part of it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._here: dict[int, nn.Parameter] = {}

    def step(
        self, params: Sequence[Tensor], inner: Callable[..., Any], closure: Callable[[], Any] | None = None
    ) -> Any:
        optimizer = self.optimizer
        if closure is not None:
            return inner(closure)
        if type(optimizer) not in BY_ELEMENT:
            return inner()
        groups, state = [(g, g["params"]) for g in optimizer.param_groups], optimizer.state
        here: defaultdict[Any, Any] = defaultdict(dict)
        pairs = [(p, self._part(p)) for p in params]
        for param, part in pairs:
            if param in state:
                here[part] = {k: local(v) if isinstance(v, Tensor) else v for k, v in state[param].items()}
        try:
            optimizer.state = here
            for group, whole in groups:
                group["params"] = [self._here[id(p)] if is_split(p) else p for p in whole]
            return inner()
        finally:
            optimizer.state = state
            for group, whole in groups:
                group["params"] = whole
            for param, part in pairs:
                if part in here:
                    state[param] = here[part]
                if part is not param:
                    part.grad = None

    def _part(self, param: Tensor) -> Tensor:
        if not is_split(param):
            return param
        mine, part = param._local_tensor, self._here.get(id(param))  # type: ignore[attr-defined]
        if part is None or part.data_ptr() != mine.data_ptr() or part.shape != mine.shape:
            part = self._here[id(param)] = nn.Parameter(mine.detach(), requires_grad=param.requires_grad)
        part.grad = None if param.grad is None else param.grad._local_tensor  # type: ignore[attr-defined]
        return part
