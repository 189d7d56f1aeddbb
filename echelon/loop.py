"""What the machine of a step sees of a script: its loops, loaders, optimizers, and the counters of this rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from echelon.data.loader import Part
from echelon.parallel.gradsync import Applying, GradSync, Groups


class Yielding(Protocol):
    """A loop over a loader, as the machine sees it."""

    part: Part | None
    rank_samples: int
    abandoned: bool


class Rewindable(Protocol):
    """A loader, as the machine sees it."""

    def mark(self) -> None:
        """All that was yielded so far is committed."""
        ...

    def rewind(self) -> int:
        """Yields again what was not; returns how many parts that is."""
        ...

    def samples(self) -> int:
        """Of what was yielded since the last commit."""
        ...

    def drop(self) -> None:
        """What was yielded since the last commit counts for nothing: others will have it."""
        ...

    def leave(self) -> None:
        """The run stops here: gives back what was taken and not used."""
        ...

    def held(self) -> list[list[int]]:
        """Pieces that were yielded since the last commit, where workers take them by themselves."""
        ...

    @property
    def owing(self) -> bool:
        """Parts that were lost after their loop had ended are still to come."""
        ...


class Stepping(Protocol):
    """An optimizer, as the machine sees it."""

    index: int
    stepped: bool
    """Its last step() was really applied."""
    twice: bool
    """It was seen to step more than once in an iteration: its steps need a pre-image."""
    applied: int
    """Steps applied so far."""
    syncs: list[GradSync]
    optimizer: torch.optim.Optimizer

    def params(self) -> list[Tensor]: ...
    def inner_step(self, closure: Callable[[], Any] | None = None) -> Any: ...
    @property
    def elsewhere(self) -> list[Applying]: ...
    def groups(self) -> Groups: ...
    def fetch_state(self) -> None: ...
    def load_state(self) -> None: ...
    @property
    def moved(self) -> bool: ...
    def keep_pre_image(self) -> None: ...
    def has_pre_image(self) -> bool: ...
    def put_back(self) -> None: ...
    def drop_pre_image(self) -> None: ...


@dataclass
class Times:
    """Where the time of this rank went, in seconds since the first batch."""

    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    pipe_s: float = 0.0
    """Waiting for other stages of a pipeline."""
    began: float = 0.0
    """When the first batch was asked for; 0 before that."""


@dataclass
class Counters:
    global_step: int = 0
    samples: int = 0
    """Samples this rank was given (stand-ins are none); what is given again after a loss counts once."""
    all_samples: int = 0
    """The same of all ranks, where a batch is cut over them: what a killed one had counted is known to the others."""
    _kept: tuple[int, int] = 0, 0
    epoch: int = 0
    lost_steps: int = 0
    skipped: int = 0
    """Updates that this rank told of as skipped."""
    times: Times = field(default_factory=Times)

    def given(self, mine: int, everybody: int) -> None:
        self.samples += mine
        self.all_samples += everybody

    def keep(self) -> None:
        """As of now (a Keeper): a lost step is undone to here, and its batches are given again."""
        self._kept = self.samples, self.all_samples

    def put_back(self) -> None:
        self.samples, self.all_samples = self._kept
