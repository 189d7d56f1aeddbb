"""What the lists of a schedule cost: time, the share of it that workers wait, memory; or that they stand still. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from echelon.parallel.pipeline.contract import Action
from echelon.parallel.pipeline.schedule import Orders, needs, owners


@dataclass(frozen=True)
class Times:
    """Seconds of each thing that a stage does with a micro-batch, and of its way to the next stage."""

    forward: float = 1
    backward: float = 2
    """Without weights' gradients where the schedule has them apart."""

    weights: float = 1
    transfer: float = 0

    def of(self, worker: int, action: Action) -> float:
        return {"forward": self.forward, "backward": self.backward, "weights": self.weights}[action.kind]


NOMINAL = Times()
"""A backward costs two forwards, and the way nothing."""


@dataclass(frozen=True)
class Simulated:
    """What came of it."""

    makespan: float
    """Seconds until the last worker was ready."""

    busy: tuple[float, ...]
    """Seconds that each worker computed."""

    alive: tuple[int, ...]
    """The most micro-batches that each worker held at once, counted once for each of its stages."""

    waits: Mapping[int, Action]
    """Workers that stand still for ever, and before what. Empty: the lists come to their end."""

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The share of the whole time that each worker did not compute."""
        return tuple(1 - b / self.makespan if self.makespan else 0.0 for b in self.busy)

    @property
    def bubble(self) -> float:
        """The share over all workers."""
        return sum(self.bubbles) / len(self.bubbles)


def simulate(
    orders: Orders, times: Times = NOMINAL, seconds: Callable[[int, Action], float] | None = None
) -> Simulated:
    """Plays lists with blocking receives and sends that do not block. `seconds` of an action on a worker, if they are not alike."""
    owner, cost = owners(orders), seconds or times.of
    num_stages = 1 + max((a.stage for order in orders for a in order), default=0)
    ended: dict[Action, float] = {}
    at, ready, busy = [0] * len(orders), [0.0] * len(orders), [0.0] * len(orders)
    moved = True
    while moved:
        moved = False
        for w, order in enumerate(orders):
            while at[w] < len(order):
                action = order[at[w]]
                needed = needs(action, num_stages)
                if any(n not in ended for n in needed):
                    break
                comes = [ended[n] + (times.transfer if owner[n.stage, n.micro] != w else 0) for n in needed]
                took = cost(w, action)
                ready[w] = ended[action] = max([ready[w], *comes]) + took
                busy[w] += took
                at[w] += 1
                moved = True
    waits = {w: order[at[w]] for w, order in enumerate(orders) if at[w] < len(order)}
    return Simulated(max(ready, default=0.0), tuple(busy), tuple(alive(o) for o in orders), waits)


def alive(order: tuple[Action, ...]) -> int:
    """The most micro-batches that a worker holds, from their forward to the last thing it does with them."""
    last = {(a.stage, a.micro): i for i, a in enumerate(order)}
    held = most = 0
    for i, action in enumerate(order):
        held += action.kind == "forward"
        most = max(most, held)
        held -= last[action.stage, action.micro] == i
    return most


def held(order: Sequence[Action], sizes: Callable[[int, int], tuple[int, int, int]]) -> int:
    """The most bytes that a worker holds of its micro-batches. `sizes` of one, by stage and number: what its forward keeps, the most that is
    there in its backward, and what stays after it for gradients of weights that are put off."""
    now = most = 0
    for action in order:
        kept, unwound, left = sizes(action.stage, action.micro)
        if action.kind == "forward":
            now += kept
            most = max(most, now)
        elif action.kind == "backward":
            now -= kept
            most = max(most, now + unwound)
            now += left
        else:
            now -= left
    return most


def predicted(places: int, micros: int) -> float:
    """The bubble of GPipe and of 1F1B where all stages take the same time."""
    return (places - 1) / (micros + places - 1)


def measured(computed: Sequence[float], total: float) -> float:
    """The bubble of a step that took `total` seconds, out of the seconds that each worker computed in it."""
    return 1 - sum(computed) / (len(computed) * total) if total else 0.0
