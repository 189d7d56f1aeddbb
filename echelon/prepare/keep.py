"""Keepers: what is put back when a step is lost, so that a replay starts where the last commit ended.

`keep` is called on the path of every step, so it copies into memory that it already has; `put_back` is rare.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from echelon.data import randomness
from echelon.data.tree import map_tree
from echelon.mesh.layout import Stateful
from echelon.parallel.local import local


class Keeper(Protocol):
    def keep(self) -> None:
        """Remembers the present."""
        ...

    def put_back(self) -> None:
        """Makes the present what it was at the last keep()."""
        ...


class Tensors:
    """Copies of some tensors, in memory that is made once. Whoever owns the list may take tensors out of it, or put others in their stead
    before anything has changed, and calls follow() when some have come in."""

    def __init__(self, live: list[Tensor]) -> None:
        self.live = live
        self.copies: list[Tensor] = [torch.empty_like(local(t)) for t in live]
        self._of = list(live)

    @torch.no_grad()
    def keep(self) -> None:
        self.follow()
        if self.live:
            torch._foreach_copy_(self.copies, [local(t) for t in self.live])

    @torch.no_grad()
    def put_back(self) -> None:
        self.follow()
        if self.live:
            torch._foreach_copy_([local(t) for t in self.live], self.copies)

    @torch.no_grad()
    def follow(self) -> None:
        """Copies of what is no longer there go with it; what is new is kept as it is now."""
        if len(self.live) != len(self._of) or any(
            a is not b for a, b in zip(self.live, self._of, strict=True)
        ):
            known = {id(t): copy for t, copy in zip(self._of, self.copies, strict=True)}
            self.copies = [known[id(t)] if id(t) in known else local(t).clone() for t in self.live]
            self._of = list(self.live)


class Buffers:
    """A model's buffers (BatchNorm's running statistics and the like), also those added or replaced later."""

    def __init__(self, model: nn.Module) -> None:
        self.homes = [m._buffers for m in model.modules()]
        self.known: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        self.kept = Tensors([])

    def keep(self) -> None:
        live = [(home, name, b) for home in self.homes if home for name, b in home.items() if b is not None]
        if len(live) != len(self.known) or any(
            a[2] is not b[2] for a, b in zip(live, self.known, strict=True)
        ):
            self.known = live
            self.kept = Tensors([b.detach() for _, _, b in live])
        self.kept.keep()

    def put_back(self) -> None:
        for home, name, tensor in self.known:
            home[name] = tensor  # forward may have put another one there
        self.kept.put_back()


class Randomness:
    """Every random generator of this process."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.state: randomness.RandomState | None = None

    def keep(self) -> None:
        self.state = randomness.capture(self.cuda)

    def put_back(self) -> None:
        if self.state is not None:
            randomness.restore(self.state)


class Hyper:
    """An optimizer's hyper-parameters (learning rates, momenta): plain numbers, so a shallow copy is enough."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.groups: list[dict[str, Any]] = []

    def keep(self) -> None:
        self.groups = [
            {k: _plain(v) for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups
        ]

    def put_back(self) -> None:
        for group, kept in zip(self.optimizer.param_groups, self.groups, strict=False):
            for key, value in kept.items():
                if isinstance(group[key], Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value


class Schedule:
    """A scheduler's own counters."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.state: dict[str, Any] = {}

    def keep(self) -> None:
        self.state = {k: _plain(v) for k, v in self.scheduler.state_dict().items()}

    def put_back(self) -> None:
        self.scheduler.load_state_dict(copy.deepcopy(self.state))


class Scaling:
    """A GradScaler's scale and growth counter, which stay on their device."""

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self.kept: tuple[Tensor | None, Tensor | None] = (None, None)

    def _live(self) -> tuple[Tensor | None, Tensor | None]:
        """None before the first use, and for a scaler that is not enabled."""
        return getattr(self.scaler, "_scale", None), getattr(self.scaler, "_growth_tracker", None)

    def keep(self) -> None:
        live = self._live()
        self.kept = tuple(None if t is None else t.detach().clone() for t in live)  # type: ignore[assignment]

    def put_back(self) -> None:
        for live, kept in zip(self._live(), self.kept, strict=True):
            if live is not None and kept is not None:
                live.copy_(kept)
        if self.scaler.is_enabled():
            self.scaler._per_optimizer_states.clear()


class Tracked:
    """Anything with state_dict and load_state_dict: deep copies."""

    def __init__(self, obj: Stateful) -> None:
        self.obj = obj
        self.state: dict[str, Any] = {}

    def keep(self) -> None:
        self.state = _deep(self.obj.state_dict())

    def put_back(self) -> None:
        self.obj.load_state_dict(_deep(self.state))


class PreImage:
    """Parameters and optimizer state before a step that a later optimizer of the same iteration may undo."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.params: Tensors | None = None
        self.state: dict[Any, dict[str, Any]] | None = None

    @torch.no_grad()
    def keep(self) -> None:
        live = [local(p.detach()) for g in self.optimizer.param_groups for p in g["params"]]
        if self.params is None or not _same(self.params.live, live):
            self.params = Tensors(live)
        self.params.keep()
        self.state = {p: {k: _deep(v) for k, v in s.items()} for p, s in self.optimizer.state.items()}

    def put_back(self) -> None:
        if self.params is not None and self.state is not None:
            self.params.put_back()
            self.optimizer.state.clear()
            self.optimizer.state.update({p: dict(s) for p, s in self.state.items()})
            self.state = None

    def drop(self) -> None:
        self.state = None


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.data_ptr() == y.data_ptr() and x.shape == y.shape for x, y in zip(a, b, strict=True)
    )


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return list(value)
    if isinstance(value, dict):
        return dict(value)
    return value.detach().clone() if isinstance(value, Tensor) else value


def _deep(state: Any) -> Any:
    """A copy that shares nothing with the original: tensors cloned, the rest deep-copied."""
    if isinstance(state, dict):
        return {key: _deep(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)) and any(isinstance(v, (Tensor, dict, list)) for v in state):
        return type(state)(_deep(v) for v in state)
    if isinstance(state, Tensor):
        return map_tree(lambda t: t.detach().clone(), state)
    return copy.deepcopy(state)
