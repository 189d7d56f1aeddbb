"""In which order each worker of a pipeline does its forwards and backwards. Pure.

Every list goes through the micro-batches of a stage in the same order, forward and backward, so gradients are added in that
order whatever the schedule. bubble.py says what a schedule costs; replicas.py makes the lists where several workers share a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from echelon.parallel.pipeline.contract import Action

Schedule = Literal["1f1b", "gpipe", "interleaved", "zero-bubble"]
Order = tuple[Action, ...]
"""What one worker does, one thing after the other."""
Orders = tuple[Order, ...]
"""… and all of them, as they are numbered in the group of the pipe."""


def num_stages(schedule: Schedule, places: int, chunks: int) -> int:
    """Into how many stages the model is cut."""
    return places * chunks if schedule == "interleaved" else places


def plain(schedule: Schedule, places: int, micros: int, chunks: int = 1) -> Orders:
    """The lists of a pipeline with one worker at each place. `chunks`: stages of each, when interleaved."""
    if schedule == "interleaved" and chunks > 1:
        return tuple(interleaved(p, places, micros, chunks) for p in range(places))
    if schedule == "gpipe":
        return tuple(one_by_one(p, range(micros), micros) for p in range(places))
    lists = [one_by_one(p, range(micros), places - p) for p in range(places)]
    return tuple(apart(o, lag=p) for p, o in enumerate(lists)) if schedule == "zero-bubble" else tuple(lists)


def one_by_one(stage: int, micros: Sequence[int], alive: int) -> Order:
    """First `alive` forwards, then a backward and a forward in turn (1F1B); where all are alive at once, this is GPipe.

    With alive = P - stage, the first backward of a stage is ready when the last of these forwards is over."""
    order = [Action("forward", stage, m) for m in micros[:alive]]
    for at, micro in enumerate(micros):
        order.append(Action("backward", stage, micro))
        order += [Action("forward", stage, m) for m in micros[at + alive : at + alive + 1]]
    return tuple(order)


def interleaved(place: int, places: int, micros: int, chunks: int) -> Order:
    """1F1B of a worker that has every `places`-th stage, `chunks` of them.

    Micro-batches go in rounds of at least as many as there are places (fewer only if there are no more): a round goes through
    one of the worker's stages, then through the next. Rounds differ by one at most, so a remainder costs nothing: a short round
    would come back to a worker before the others have something for it to do."""
    rounds = _rounds(micros, places)
    stages = [place + places * c for c in range(chunks)]
    forwards = [Action("forward", s, m) for r in rounds for s in stages for m in r]
    backwards = [Action("backward", s, m) for r in rounds for s in reversed(stages) for m in r]
    ahead = 2 * (places - place - 1) + (chunks - 1) * len(rounds[0])
    order = forwards[:ahead]
    for at, backward in enumerate(backwards):
        order += [*forwards[ahead + at : ahead + at + 1], backward]
    return tuple(order)


def _rounds(micros: int, places: int) -> list[range]:
    number = max(1, micros // places)
    base, longer = divmod(micros, number)
    starts = [i * base + min(i, longer) for i in range(number + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def apart(order: Order, lag: int) -> Order:
    """Zero-bubble (ZB-H1): backward gives the gradients of inputs alone, which the stage before waits for; those of weights come
    `lag` backwards later, so that enough of them are left to fill the end. With lag = stage no stage keeps more
    micro-batches than the first one does in 1F1B."""
    found: list[Action] = []
    waiting: list[Action] = []
    for action in order:
        found.append(action)
        if action.kind == "backward":
            waiting.append(Action("weights", action.stage, action.micro))
            if len(waiting) > lag:
                found.append(waiting.pop(0))
    return tuple(found + waiting)


def forwards(orders: Orders) -> Orders:
    """The same without training: nothing but the forwards."""
    return tuple(tuple(a for a in order if a.kind == "forward") for order in orders)


def needs(action: Action, num_stages: int) -> list[Action]:
    """What must be done before this, anywhere. A stage may take values of any earlier one: that is done before its predecessor."""
    kind, stage, micro = action.kind, action.stage, action.micro
    if kind == "forward":
        return [Action("forward", stage - 1, micro)] if stage else []
    if kind == "weights":
        return [Action("backward", stage, micro)]
    own = [Action("forward", stage, micro)]
    return own if stage == num_stages - 1 else [*own, Action("backward", stage + 1, micro)]


def owners(orders: Orders) -> dict[tuple[int, int], int]:
    """Which worker has which micro-batch on which stage: (stage, micro) -> worker."""
    return {(a.stage, a.micro): w for w, order in enumerate(orders) for a in order if a.kind == "forward"}
