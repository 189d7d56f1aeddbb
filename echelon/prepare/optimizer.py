"""An optimizer under the machine: the same object, with `step` and `zero_grad` replaced on the instance.

On the instance, because schedulers refuse a duck-typed optimizer and bypass a swapped class when they were made first.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from echelon.parallel.gradsync import Applying, GradSync, Groups, applying
from echelon.parallel.sharded.hosted import Hosted
from echelon.parallel.sharded.owned import Owned
from echelon.parallel.sharded.parts import Parts
from echelon.prepare.keep import PreImage
from echelon.ps.optimizers import recipe_of
from echelon.step import Machine


class PreparedOptimizer:
    """What the machine knows about one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, machine: Machine) -> None:
        self.optimizer, self.machine = optimizer, machine
        self.index = len(machine.optimizers)
        self.stepped, self.twice, self.applied = True, False, 0
        self._applied_before = 0
        """Steps applied at the last snapshot, or undone since: a pre-image is of use only if it is of that moment."""
        self._kept_there = False
        """The servers that run it can undo all that it stepped since."""
        self.syncs: list[GradSync] = []
        self.lr_factor: Callable[[int], float] | None = None
        """Multiplies the learning rate of step n (batch=per-worker); schedulers never see it."""
        self.owned: Owned | None = None
        """With sharded,level=1: which parameters are stepped here."""
        self.parts: Parts | Hosted | None = None
        """With sharded,level=2 and 3: steps on this rank's parts. With offload: on copies in host memory."""
        self._inner_step = optimizer.step
        self._inner_zero = optimizer.zero_grad
        self._pre_image = PreImage(optimizer)
        self._bind()
        machine.optimizers.append(self)

    def _bind(self) -> None:
        prepared = self

        def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return prepared.machine.step(prepared, closure)

        def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            for sync in prepared.syncs:
                sync.withdraw(prepared.params())
            prepared._inner_zero(set_to_none=set_to_none)

        inner_state, inner_load = self.optimizer.state_dict, self.optimizer.load_state_dict

        def state_dict(self: torch.optim.Optimizer) -> dict[str, Any]:
            prepared.fetch_state()
            return inner_state()

        def load_state_dict(self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            inner_load(state_dict)
            if prepared.owned is not None:
                prepared.owned.drop_state(prepared.optimizer)
            prepared.load_state()

        self.optimizer.state_dict = types.MethodType(state_dict, self.optimizer)  # type: ignore[method-assign]
        self.optimizer.load_state_dict = types.MethodType(load_state_dict, self.optimizer)  # type: ignore[method-assign]
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers need not wrap it again
        self.optimizer.step = types.MethodType(step, self.optimizer)  # type: ignore[method-assign]
        self.optimizer.zero_grad = types.MethodType(zero_grad, self.optimizer)  # type: ignore[method-assign]
        self.optimizer._echelon = self  # type: ignore[attr-defined]

    def params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def inner_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's own step, at the scaled learning rate."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        with self._scaled():
            inner = self._inner_step
            if self.parts is not None:
                inner = partial(self.parts.step, self.params(), inner)  # type: ignore[assignment]
            if self.owned is not None:
                return self.owned.step(self.params(), inner, closure)
            return inner() if closure is None else inner(closure)

    @contextlib.contextmanager
    def _scaled(self) -> Iterator[None]:
        factor = self.lr_factor(self.machine.counters.global_step) if self.lr_factor else 1.0
        if factor == 1.0:
            yield
            return
        plain = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        try:
            yield
        finally:
            for group, lr in zip(self.optimizer.param_groups, plain, strict=True):
                group["lr"] = lr

    # -- an optimizer that runs elsewhere --------------------------------------------------------------------------

    @property
    def elsewhere(self) -> list[Applying]:
        """Meetings whose servers run it; [] when it runs here."""
        return [there for sync in self.syncs if (there := applying(sync)) is not None]

    def groups(self) -> Groups:
        """What a server must know of a step: each group's numbers as they are now, and its parameters."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        with self._scaled():
            recipes = recipe_of(self.optimizer)
        return [(r, g["params"]) for r, g in zip(recipes, self.optimizer.param_groups, strict=True)]

    def fetch_state(self) -> None:
        """The optimizer's state comes here, until the next step: for a checkpoint, or a script that asks."""
        for sync in self.elsewhere if not self.optimizer.state else ():
            found = sync.state(self.index, self.params())
            for p in self.params():
                if id(p) in found:
                    self.optimizer.state[p] = found[id(p)]

    def load_state(self) -> None:
        """Parameters and state as they are here become the servers'."""
        for sync in self.elsewhere:
            sync.load(self.index, self.groups(), self.optimizer.state)
        if self.elsewhere:
            self.optimizer.state.clear()

    @property
    def moved(self) -> bool:
        """It stepped since the last snapshot, and that was not undone."""
        return self.applied != self._applied_before

    def keep_pre_image(self) -> None:
        if self.has_pre_image() or self.moved:
            return
        if self.elsewhere:
            self._kept_there = True
        else:
            self._pre_image.keep()

    def has_pre_image(self) -> bool:
        return self._kept_there or self._pre_image.state is not None

    def put_back(self) -> None:
        """Its steps since the last snapshot did not happen, if it has a pre-image. What servers do about theirs: see away.undo."""
        if self._kept_there:
            self.optimizer.state.clear()  # what was fetched may be of a step that did not happen
        if self.has_pre_image():
            self._applied_before = self.applied
        self._kept_there = False
        self._pre_image.put_back()

    def drop_pre_image(self) -> None:
        self._applied_before, self._kept_there = self.applied, False
        self._pre_image.drop()


def warmup_factor(workers: int, warmup_steps: int) -> Callable[[int], float]:
    """Linear scaling: from 1 to `workers` over the first `warmup_steps` steps, then `workers`."""

    def factor(step: int) -> float:
        share = 1.0 if step >= warmup_steps else (step + 1) / (warmup_steps + 1)
        return 1.0 + (workers - 1) * share

    return factor


def prepared_optimizer(optimizer: Any) -> PreparedOptimizer | None:
    return getattr(optimizer, "_echelon", None)
