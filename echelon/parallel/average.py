"""An exponential moving average of the weights, moved once a committed step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from echelon.mesh.layout import Placed
from echelon.parallel.local import local


class Average:
    """average = decay * average + (1 - decay) * weights; buffers are the model's own. Of what is split, the part that is here."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.live: list[Tensor] = []
        self.shadow: list[Tensor] = []
        self.on_begin: Callable[[], None] = lambda: None

    def begin(self, placed: Mapping[int, Placed]) -> None:
        """The average is what the weights are now. Before that there is none."""
        here = [p for p in self.model.parameters() if id(p) not in placed or placed[id(p)].runs]
        self.live[:] = [p for p in here if p.is_floating_point()]
        self.shadow[:] = [local(p.detach()).clone() for p in self.live]
        self.on_begin()

    @torch.no_grad()
    def update(self) -> None:
        if self.shadow:
            torch._foreach_lerp_(self.shadow, self._values(), 1.0 - self.decay)

    def _values(self) -> list[Tensor]:
        return [local(p.detach()) for p in self.live]

    def drop(self, gone: list[Tensor]) -> None:
        """These parameters are no longer here."""
        ids = {id(p) for p in gone}
        pairs = [(p, s) for p, s in zip(self.live, self.shadow, strict=True) if id(p) not in ids]
        self.live[:], self.shadow[:] = [p for p, _ in pairs], [s for _, s in pairs]

    def narrow(self, parts: Mapping[int, tuple[int, int]]) -> None:
        """Of these parameters (by id) elements [start, stop) are here from now on."""
        for at, (param, shadow) in enumerate(zip(self.live, self.shadow, strict=True)):
            if id(param) in parts:
                start, stop = parts[id(param)]
                self.shadow[at] = shadow.reshape(-1)[start:stop].clone()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the model's weights are the average."""
        with torch.no_grad():
            kept = [value.clone() for value in self._values()]
            torch._foreach_copy_(self._values(), self.shadow)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._values(), kept)
