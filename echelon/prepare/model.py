"""A model under the machine: the same object on its device, equal on all ranks, with hooks that let its gradients meet."""

from __future__ import annotations

import functools
import time
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from echelon import activity
from echelon.clock import Deadline
from echelon.comm.group import Group, Lost
from echelon.data.tree import map_tree
from echelon.errors import PeerLost
from echelon.step import Machine

START_LIMIT_S = 1800.0
FIRST_BYTES = 64 << 20
"""First weights are sent in messages of about this size."""


def names(model: nn.Module) -> dict[int, str]:
    """Every parameter's full name as the user wrote it: no wrapper's `module.`, no `_orig_mod.`."""
    return {id(p): plain_name(n) for n, p in unwrapped(model).named_parameters()}


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside DataParallel wrappers."""
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    return model


def plain_name(name: str) -> str:
    return ".".join(piece for piece in name.split(".") if piece != "_orig_mod")


def sparse_params(model: nn.Module) -> set[int]:
    """Parameters whose gradients come as rows."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    return {id(m.weight) for m in model.modules() if isinstance(m, tables) and m.sparse}


@torch.no_grad()
@activity.named("the first weights")
def equalise(tensors: Iterable[Tensor], group: Group) -> None:
    """Rank 0's values everywhere, in messages of some size: nobody needs room for the whole model twice."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for same in kinds.values():
        batch: list[Tensor] = []
        for tensor in same:
            batch.append(tensor)
            if sum(t.nbytes for t in batch) >= FIRST_BYTES:
                _send(batch, group)
                batch = []
        if batch:
            _send(batch, group)


def _send(same: list[Tensor], group: Group) -> None:
    dtype = same[0].dtype
    wire = torch.cat([t.reshape(-1) for t in same])
    wire = wire.to(torch.uint8) if dtype is torch.bool else wire
    outcome = group.broadcast(wire).wait(Deadline.after(START_LIMIT_S))
    if isinstance(outcome, Lost):
        raise PeerLost(
            f"a peer was lost while the first weights were sent: {outcome.reason}", peers=outcome.peers
        )
    for tensor, piece in zip(same, wire.split([t.numel() for t in same]), strict=True):
        tensor.copy_(piece.view(tensor.shape).to(dtype))


class Inert:
    """What a hook or an override of ours becomes in a copy of the model (deepcopy, pickle): nothing.

    A copied model belongs to nobody's run until it is prepared itself.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return Inert, ()


class Watch:
    """Times a model's forward and backward. Its hooks do nothing in a copy of the model."""

    def __init__(self, model: nn.Module, machine: Machine) -> None:
        self.machine = machine
        self.entered = 0.0
        self.left = 0.0
        self.gave: Callable[[Any], None] | None = None
        """Is told what a forward gave."""
        model.register_forward_pre_hook(Hook(self._enter))
        model.register_forward_hook(Hook(self._leave))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.entered = time.perf_counter()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.left = time.perf_counter()
        self.machine.counters.times.forward_s += self.left - self.entered
        if self.gave is not None and not torch.compiler.is_compiling():
            self.gave(output)

    def backward_over(self, waited_s: float) -> None:
        if self.left:
            self.machine.counters.times.backward_s += max(0.0, time.perf_counter() - self.left - waited_s)
            self.left = 0.0


class Hook:
    """A module hook that stays behind when the module is copied."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)

    def __reduce__(self) -> Any:
        return Inert, ()


class Override:
    """A method of ours on a module instance; in a copy it is the class's own method again."""

    def __init__(
        self, module: nn.Module, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self.module, self.name = module, name
        self.fn = wrap(getattr(module, name))
        module.__dict__[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _own_method, (self.module, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _own_method(memo[id(self.module)], self.name)


def _own_method(module: nn.Module, name: str) -> Callable[..., Any]:
    return types.MethodType(getattr(type(module), name), module)


def compute_in(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Forward under autocast; outputs come back in float32, so losses are taken in full precision."""

    def wrap(inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device.type, dtype=dtype):
                out = inner(*args, **kwargs)
            return map_tree(lambda t: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t, out)

        return forward

    Override(model, "forward", wrap)


def watch_zero_grad(model: nn.Module, machine: Machine) -> None:
    """model.zero_grad() takes back provisional gradients as optimizer.zero_grad() does."""

    def wrap(inner: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(set_to_none: bool = True) -> None:
            params = list(model.parameters())
            for sync in machine.syncs:
                sync.withdraw(params)
            inner(set_to_none=set_to_none)

        return zero_grad

    Override(model, "zero_grad", wrap)


class Ran:
    """strict: which parameters belong to modules whose forward ran, by full name."""

    def __init__(self) -> None:
        self.ran: set[str] = set()

    def watch(self, model: nn.Module) -> None:
        known = names(model)
        for module in model.modules():
            own = [known[id(p)] for p in module.parameters(recurse=False) if id(p) in known]
            if own:
                module.register_forward_pre_hook(Hook(functools.partial(self._note, own)))

    def _note(self, own: list[str], module: nn.Module, args: Any) -> None:
        self.ran.update(own)
