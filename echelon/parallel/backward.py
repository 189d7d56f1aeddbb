"""The end of a backward pass: one callback when the outermost one is over.

A queued callback of the autograd engine fires at the end of the backward in which it was queued. Reentrant activation
checkpointing runs a backward inside a backward, so a callback queued by a hook in there would fire too early:
CheckpointFunction.backward is wrapped to queue on the outer one, and to tell hooks that they are inside.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.checkpoint import CheckpointFunction


class _State:
    def __init__(self) -> None:
        self.depth = 0
        self.task = -1
        self.waiting: list[Callable[[], None]] = []


class _Local(threading.local):
    def __init__(self) -> None:
        self.state = _State()


_local = _Local()


def at_end(fn: Callable[[], None]) -> None:
    """Calls `fn` once when the outermost backward that runs now is over. Only inside a backward."""
    state = _local.state
    if state.depth == 0:
        _queue(state)
    if fn not in state.waiting:
        state.waiting.append(fn)


def _queue(state: _State) -> None:
    task = torch._C._current_graph_task_id()
    if task != state.task:
        state.task = task
        state.waiting.clear()  # an earlier backward raised before its end
        Variable._execution_engine.queue_callback(functools.partial(_run, state))  # type: ignore[attr-defined]


def _run(state: _State) -> None:
    state.task = -1
    waiting, state.waiting = state.waiting, []
    for fn in waiting:
        fn()


def watch_checkpoints() -> None:
    """Wraps torch's reentrant checkpointing once in this process."""
    inner = CheckpointFunction.backward
    if getattr(inner, "_echelon", False):
        return

    @functools.wraps(inner)
    def backward(ctx: Any, *args: Any) -> Any:
        state = _local.state
        if state.depth == 0:
            _queue(state)
        state.depth += 1
        try:
            return inner(ctx, *args)
        finally:
            state.depth -= 1

    backward._echelon = True  # type: ignore[attr-defined]
    CheckpointFunction.backward = staticmethod(backward)  # type: ignore[method-assign]


def hook(param: Tensor, fn: Callable[[Tensor], None]) -> Any:
    """Calls fn when a gradient has been accumulated; lives through times in which the parameter is frozen."""
    trained = param.requires_grad
    handle = param.requires_grad_(True).register_post_accumulate_grad_hook(fn)
    param.requires_grad_(trained)
    return handle


def pre_hook(param: Tensor, fn: Callable[[Tensor], Tensor | None]) -> Any:
    """Calls fn with a gradient before it is accumulated; what it returns is accumulated instead."""
    trained = param.requires_grad
    handle = param.requires_grad_(True).register_hook(fn)
    param.requires_grad_(trained)
    return handle
