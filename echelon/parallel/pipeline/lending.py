"""Who brings a stage's parameters: they lie whole on its rank, or its replicas keep parts of them and bring them when they are used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Uses:
    """What the stages of a rank use."""

    calls: Mapping[int, Sequence[tuple[str, ...]]]
    """Stage -> names of parameters and buffers of each call, in order."""

    tied: frozenset[str]
    """Parameters that stages of other ranks use as well."""


class Lending(Protocol):
    """What a stage says while it runs. All replicas of a stage say the same in the same order; each call may block until they do.

    A lost peer is told by the step's meeting: what is brought then is zeros."""

    def step(self) -> AbstractContextManager[None]:
        """Around all actions of a step, or of a forward without gradients."""
        ...

    def forward(self, stage: int) -> AbstractContextManager[None]:
        """Around a stage's forward of one micro-batch."""
        ...

    def backward(self, stage: int) -> AbstractContextManager[None]:
        """Around its backward."""
        ...

    def weights(self, stage: int) -> AbstractContextManager[None]:
        """Around the gradients of weights that a backward put off."""
        ...

    def need(self, names: tuple[str, ...]) -> None:
        """A call is about to use these parameters and buffers, in forward or when it is computed again."""
        ...

    def made(self, tensors: Sequence[Tensor], names: tuple[str, ...]) -> None:
        """A function made these tensors with parameters of these names; its backward may use them in ways that autograd does not see."""
        ...


class Whole:
    """Nothing has to be brought."""

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(self, stage: int) -> AbstractContextManager[None]:
        return nullcontext()

    backward = weights = forward

    def need(self, names: tuple[str, ...]) -> None:
        pass

    def made(self, tensors: Sequence[Tensor], names: tuple[str, ...]) -> None:
        pass


WHOLE = Whole()
