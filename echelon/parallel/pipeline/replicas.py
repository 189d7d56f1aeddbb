"""Pipelines whose stages have several workers (`pipeline=3+1`): who does which micro-batch, and in which order. Pure.

All ranks compute this from the same numbers, in the same order of operations, so all come to the same lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from echelon.parallel.pipeline.contract import Action, Kind
from echelon.parallel.pipeline.schedule import Orders, Schedule, apart, needs, plain

Shares = tuple[tuple[int, ...], ...]
"""How many micro-batches each worker of each stage gets."""

MARGIN = 0.1
"""Shares are changed when that shortens the slowest worker's part by this share of it: measured times are never quite alike."""

MORE, LITTLE = 3, 0.02
"""So many more micro-batches may be alive on a worker than an even pipeline needs, if each step gets shorter by at least this share."""


def orders(
    schedule: Schedule,
    widths: Sequence[int],
    micros: int,
    chunks: int = 1,
    shares: Shares | None = None,
    seconds: Sequence[Sequence[float]] | None = None,
) -> Orders:
    """The lists of all workers, stage by stage. `seconds` that a micro-batch takes on each worker of each stage: measured ones, or
    by default as if the stages were cut so that all are equally busy. `shares`: what was agreed on, else by those seconds."""
    if set(widths) == {1}:
        return plain(schedule, len(widths), micros, chunks)
    assert schedule != "interleaved", "refused in demands.py"
    pace = seconds or [[float(width)] * width for width in widths]
    agreed = shares or tuple(shared(micros, [1 / s for s in each]) for each in pace)
    parts = [part for stage, each in enumerate(pace) for part in dealt(agreed[stage], each, into=stage > 0)]
    stages = tuple(stage for stage, width in enumerate(widths) for _ in range(width))
    pipe = _Pipe(
        schedule == "gpipe", len(widths), stages, tuple(parts), tuple(s for each in pace for s in each)
    )
    lists = _roomy(pipe, widths)
    if schedule != "zero-bubble":
        return lists
    lags = [-(-sum(widths[:s]) // widths[s]) for s in stages]
    return tuple(apart(order, lag) for order, lag in zip(lists, lags, strict=True))


def _roomy(pipe: _Pipe, widths: Sequence[int]) -> Orders:
    """As many micro-batches alive as keep every worker from a stage on busy while the first comes back; and some more where that makes
    the step shorter by more than a little, as it does when a slow worker stands beside a fast one."""
    fewest = [inf if pipe.all_first else -(-sum(widths[s:]) // widths[s]) for s in pipe.stages]
    plays = [
        _Play(pipe, [alive + more for alive in fewest]) for more in range(1 if pipe.all_first else MORE + 1)
    ]
    lists = [play.lists() for play in plays]
    best = min(play.makespan for play in plays)
    return next(o for o, play in zip(lists, plays, strict=True) if play.makespan <= best * (1 + LITTLE))


def shared(micros: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Whole shares in proportion to speeds: rounded down, and what is left goes one by one to whoever would be ready first with one
    more (the first of equals). So a worker that is slow out of all proportion gets none."""
    total = sum(speeds)
    counts = [int(micros * speed / total) for speed in speeds]
    for _ in range(micros - sum(counts)):
        r = min(range(len(speeds)), key=lambda r: ((counts[r] + 1) / speeds[r], r))
        counts[r] += 1
    return tuple(counts)


def dealt(counts: Sequence[int], seconds: Sequence[float], into: bool = False) -> list[tuple[int, ...]]:
    """The micro-batches of each worker of a stage: numbered as they will be over, if each worker goes through its part without a
    pause, so that the next stage gets them in order. `into`: numbered as they are begun, for a stage that others feed in order."""
    moments = [
        ((k if into else k + 1) * seconds[r], r) for r, count in enumerate(counts) for k in range(count)
    ]
    parts: list[list[int]] = [[] for _ in counts]
    for micro, (_, r) in enumerate(sorted(moments)):
        parts[r].append(micro)
    return [tuple(part) for part in parts]


def redealt(counts: Sequence[int], seconds: Sequence[float], margin: float = MARGIN) -> tuple[int, ...]:
    """The shares of a stage's workers after a look at what a micro-batch took on each: the present ones, unless others are better by
    more than `margin`. A worker that has no micro-batch now is counted with its last measured time."""
    new = shared(sum(counts), [1 / max(s, 1e-9) for s in seconds])
    takes, would_take = (max(n * s for n, s in zip(c, seconds, strict=True)) for c in (counts, new))
    return new if would_take < takes * (1 - margin) else tuple(counts)


@dataclass(frozen=True)
class _Pipe:
    all_first: bool
    """Every forward before the first backward, as GPipe has it."""

    num_stages: int
    stages: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    """… of each worker."""


class _Play:
    """A pipeline in a clockwork where everything takes its nominal time: who is idle does a backward if one is ready, else a
    forward if it may keep one more micro-batch; of several the one that was ready first. The order in which a worker did things
    is its list. Such lists cannot deadlock as long as sends do not block: the play itself is a way through them. And the play
    comes to its end whatever the shares: the last stage never waits for room, so neither does the one before for ever."""

    def __init__(self, pipe: _Pipe, alive: Sequence[float]) -> None:
        self.pipe, self.alive = pipe, alive
        self.forwards = [list(part) for part in pipe.parts]
        self.backwards: list[list[int]] = [[] for _ in pipe.parts]
        self.idle_at = [0.0] * len(pipe.parts)
        self.ended: dict[Action, float] = {}
        self.now = 0.0
        self.found: list[list[Action]] = [[] for _ in pipe.parts]

    def lists(self) -> Orders:
        while any(self.forwards) or any(self.backwards):
            for w, at in enumerate(self.idle_at):
                if at <= self.now:
                    self._act(w)
            self.now = min((t for t in self.idle_at if t > self.now), default=self.now)
        return tuple(map(tuple, self.found))

    @property
    def makespan(self) -> float:
        return max(self.idle_at)

    def _act(self, w: int) -> None:
        back = (
            None
            if self.pipe.all_first and self.forwards[w]
            else self._first("backward", w, self.backwards[w])
        )
        room = len(self.backwards[w]) < self.alive[w]
        action = back or (self._first("forward", w, self.forwards[w]) if room else None)
        if action is None:
            return
        (self.backwards if back else self.forwards)[w].remove(action.micro)
        if not back:
            self.backwards[w].append(action.micro)
        self.idle_at[w] = self.ended[action] = self.now + self.pipe.seconds[w] * (2 if back else 1)
        self.found[w].append(action)

    def _first(self, kind: Kind, w: int, micros: Sequence[int]) -> Action | None:
        ready = []
        for at, micro in enumerate(micros):
            action = Action(kind, self.pipe.stages[w], micro)
            since = max((self.ended.get(n, inf) for n in needs(action, self.pipe.num_stages)), default=0.0)
            if since <= self.now:
                ready.append((since, at, action))
        return min(ready, key=lambda r: r[:2])[2] if ready else None
