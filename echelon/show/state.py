"""What is known of a run's progress, gathered from its events. Pure: a moment and an event in, numbers out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from echelon.control.roster import SERVER, WORKER, Who
from echelon.events import (
    Beat,
    CheckpointSaved,
    Event,
    Failed,
    Left,
    Logged,
    Metric,
    PhaseChanged,
    ProcessEnded,
    ProcessStarted,
    Serving,
    UpdateSkipped,
    WorkersBack,
)

RECENT_S = 10.0
PARTS = ("data", "forward", "backward", "waiting")


@dataclass(frozen=True)
class Split:
    """Where time went, in seconds; `total` also holds what none of the parts covers."""

    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    waiting: float = 0.0
    total: float = 0.0

    def __add__(self, other: Split) -> Split:
        return Split(*(a + b for a, b in zip(self.values, other.values, strict=True)))

    def __sub__(self, other: Split) -> Split:
        return Split(*(max(0.0, a - b) for a, b in zip(self.values, other.values, strict=True)))

    @property
    def values(self) -> tuple[float, float, float, float, float]:
        return self.data, self.forward, self.backward, self.waiting, self.total

    def shares(self) -> dict[str, float]:
        """Each part's share of the whole, 0 to 1; empty when nothing was measured."""
        whole = max(self.total, sum(self.values[:4]))
        return (
            {name: value / whole for name, value in zip(PARTS, self.values, strict=False)}
            if whole > 0
            else {}
        )


def split_of(beat: Beat) -> Split:
    return Split(beat.data_s, beat.forward_s, beat.backward_s, beat.wait_s, beat.total_s)


@dataclass
class Progress:
    """The run so far. `num_workers` decides whether one worker's log is already the average."""

    num_workers: int = 1
    num_servers: int = 0
    step: int = 0
    epoch: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    beats: dict[int, Beat] = field(default_factory=dict)
    servers: dict[int, Serving] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    phase: str = ""
    restarts: int = 0
    """How often workers were started again."""
    paused_s: float = 0.0
    """How long the run stood still for them."""
    skips: dict[int, int] = field(default_factory=dict)
    """Worker -> updates that it told of as skipped."""
    earlier_samples: int = 0
    """Of workers that were killed, as far as their beats told it."""
    used: dict[int, int] = field(default_factory=dict)
    """Worker -> its samples that are in updates, as a server told it."""
    killed: set[int] = field(default_factory=set)
    saved: CheckpointSaved | None = None
    """The last complete checkpoint."""
    _recent: deque[tuple[float, int, Split]] = field(default_factory=deque)

    def take(self, event: Event, now: float) -> None:
        """Learns from an event that came at `now` (any steady clock); kinds that say nothing here are ignored."""
        rank = event.rank or 0
        if isinstance(event, Beat):
            self.beats[rank] = event
            self.step, self.epoch = max(self.step, event.step), max(self.epoch, event.epoch)
            if self.samples == 0:
                self._recent.clear()  # what came before the first sample was not training
            self._recent.append((now, self.samples, self.split))
            while len(self._recent) > 2 and now - self._recent[1][0] > RECENT_S:
                self._recent.popleft()
        elif isinstance(event, Metric) or (isinstance(event, Logged) and self.num_workers == 1):
            self.metrics |= event.values
            self.step = max(self.step, event.step)
        elif isinstance(event, UpdateSkipped):
            self.skips[rank] = self.skips.get(rank, 0) + 1
        elif isinstance(event, WorkersBack):
            self.paused_s += event.pause_s
        elif isinstance(event, ProcessStarted):
            if event.role == WORKER:
                self._started(rank, event.incarnation)
        elif isinstance(event, ProcessEnded):
            self.killed |= {rank} if event.role == WORKER and event.code > 128 else set()
        elif isinstance(event, Left):
            self.left[rank] = event.step
            self.step = max(self.step, event.step)
        elif isinstance(event, CheckpointSaved):
            self.saved = event
        elif isinstance(event, Serving):
            self.servers[rank] = event
            for worker, count in event.samples.items():
                self.used[int(worker)] = max(count, self.used.get(int(worker), 0))
        elif isinstance(event, Failed) and event.role == WORKER:
            self.failed.setdefault(rank, event)
        elif isinstance(event, PhaseChanged):
            share = f" {event.share:.0%}" if event.share is not None else ""
            self.phase = "" if event.state == "over" else f"{event.name}{share}"

    def _started(self, rank: int, incarnation: int) -> None:
        self.killed.discard(rank)
        self.restarts += incarnation > 0
        if incarnation and rank in self.beats:  # a successor counts from 0
            self.earlier_samples += self.beats[rank].samples
            self.beats[rank] = replace(self.beats[rank], samples=0)

    @property
    def heard(self) -> set[Who]:
        """The workers and servers that ever beat."""
        return {Who(WORKER, rank) for rank in self.beats} | {Who(SERVER, rank) for rank in self.servers}

    @property
    def samples(self) -> int:
        """What a killed worker did after its last beat is known to the others, which it shared its batches with, or to the server that
        dealt them."""
        whole = max((beat.all_samples for beat in self.beats.values()), default=0)
        if self.restarts and whole:
            return whole
        return self.earlier_samples + sum(self.samples_of(rank) for rank in self.beats)

    def samples_of(self, rank: int) -> int:
        """Of one worker that has beaten."""
        if rank in self.killed and self.used:
            return self.used.get(rank, 0)
        return self.beats[rank].samples

    @property
    def skipped(self) -> int:
        return sum(self.skips.values())

    @property
    def split(self) -> Split:
        """All workers' time together, since the first batch."""
        return sum((split_of(beat) for beat in self.beats.values()), Split())

    @property
    def samples_per_s(self) -> float:
        """Over the last seconds; 0 until it can be said."""
        if len(self._recent) < 2:
            return 0.0
        (then, before, _), (now, after, _) = self._recent[0], self._recent[-1]
        return (after - before) / (now - then) if now > then else 0.0

    @property
    def recent_split(self) -> Split:
        if len(self._recent) < 2:
            return self.split
        recent = self._recent[-1][2] - self._recent[0][2]
        return recent if recent.total > 0 else self.split


def number(value: float) -> str:
    """Four significant digits, as short as they can be."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """75 -> 1 min 15 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
