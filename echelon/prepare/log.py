"""run.log: values of this rank, gathered into one record a committed step."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from torch import Tensor

from echelon.events import Logged, Sink
from echelon.step import Machine

FLUSH_S = 0.2


class Log:
    """Values are weighted by this rank's samples. A lost step's values are dropped.

    On the path of a step a value is only put aside. The beat thread makes events of them (`flush`), so that logging
    neither waits for a GPU nor for a wire; without a beat thread (`own_beat`), a step does so now and then.
    """

    def __init__(self, machine: Machine, emit: Sink, own_beat: bool) -> None:
        self.machine, self.emit, self.own_beat = machine, emit, own_beat
        self.group: list[tuple[dict[str, Any], float]] = []
        self.waiting: list[tuple[int, list[tuple[dict[str, Any], float]]]] = []
        self.lock = threading.Lock()
        self.flushed_at = 0.0

    def add(self, values: dict[str, Any]) -> None:
        machine = self.machine
        if machine.iteration_lost:
            self.group = []
            return
        part = machine.current.part if machine.current else None
        weight = float(part.count) if part else 1.0
        held = {k: _plain(v) for k, v in values.items()}
        self.group.append((held, weight))
        if not machine.share.last:
            return
        step = machine.counters.global_step + (0 if machine.in_iteration else 1)
        with self.lock:
            self.waiting.append((step, self.group))
            self.group = []
        if self.own_beat and time.monotonic() - self.flushed_at > FLUSH_S:
            self.flush()

    def forget(self) -> None:
        """The group that is open is lost or dropped."""
        self.group = []

    def flush(self) -> None:
        self.flushed_at = time.monotonic()
        with self.lock:
            waiting, self.waiting = self.waiting, []
        for step, group in waiting:
            weight = sum(w for _, w in group)
            names = dict.fromkeys(name for values, _ in group for name in values)
            means = {name: _mean([(float(v[name]), w) for v, w in group if name in v]) for name in names}
            self.emit(Logged(rank=self.machine.rank, step=step, values=means, weight=weight))


def _plain(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return float(value)
    value = value.detach()
    return value if value.is_cuda else float(value)


def _mean(pairs: list[tuple[float, float]]) -> float:
    real = [(v, w) for v, w in pairs if w > 0]
    if not real:
        return 0.0
    total = sum(w for _, w in real)
    return math.fsum(v * w for v, w in real) / total
