"""What happened in a run, as typed records: all that any display, file or report ever sees. What happened among hosts is in
hostevents.py, what an event is in event.py; everybody imports all of it from here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from echelon.event import Event as Event
from echelon.event import Sink as Sink
from echelon.event import from_dict as from_dict
from echelon.hostevents import HostAsked as HostAsked
from echelon.hostevents import HostCame as HostCame
from echelon.hostevents import HostLeft as HostLeft
from echelon.hostevents import HostLost as HostLost
from echelon.hostevents import HostRefused as HostRefused
from echelon.hostevents import HostsFormed as HostsFormed
from echelon.hostevents import HostWent as HostWent
from echelon.hostevents import Knocked as Knocked
from echelon.hostevents import Printed as Printed


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The supervisor formed the run."""

    name: str
    script: str
    strategy: str
    num_workers: int
    num_threads: int
    num_servers: int = 0


@dataclass(frozen=True, kw_only=True)
class ProcessStarted(Event):
    role: str
    host: str
    pid: int
    incarnation: int = 0


@dataclass(frozen=True, kw_only=True)
class ProcessEnded(Event):
    """A process is over: `code` as in a shell (128+n for signal n), with the peak of its resident memory."""

    role: str
    host: str
    pid: int
    code: int
    peak_rss_bytes: int = 0
    cause: str = ""
    """Why a signal may have ended it, as seen on its host."""
    log: str = ""
    log_tail: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Configured(Event):
    """The script called init: the strategy's fields as they count, the script's own among them."""

    strategy: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Facts(Event):
    """The first lines of a run: batch sizes, scaling, and what would change the answer."""

    lines: list[str]


@dataclass(frozen=True, kw_only=True)
class Sign(Event):
    """A process that has a seat is alive: where it stands."""

    step: int = 0
    doing: str = ""
    stack: list[str] = field(default_factory=list)
    peak_rss_bytes: int = 0
    progress: int = 0
    """Grows with whatever moves in it."""
    cpu_s: float = 0.0
    site: str = ""
    """The innermost line of the script's own code."""
    waits_in: str = ""
    """The operation in which its main thread waits for others; "" when it does not."""
    waits_group: str = ""
    waits_number: int = 0
    waits_bytes: int = 0
    waits_s: float = 0.0
    begun: dict[str, int] = field(default_factory=dict)
    """Group -> the number of the last operation it began there."""
    links: dict[str, float] = field(default_factory=dict)
    """Its connections to other machines, "local remote" -> seconds for which nothing answered; a worker's while it waits."""


@dataclass(frozen=True, kw_only=True)
class Serving(Sign):
    """Parameter server `rank` is alive: what it did so far. No Beat: whoever counts workers must not count it."""

    updates: int = 0
    """Optimizer steps, of all models."""
    sums: int = 0
    """Pieces of buckets summed for workers that apply them."""
    bytes_in: int = 0
    bytes_out: int = 0
    stale: list[int] = field(default_factory=list)
    """By how many updates parts were behind: p50, p99, max. Empty where none can be."""
    behind: dict[str, int] = field(default_factory=dict)
    """The same as a histogram: 0, 1, 2-3, 4-7, 8-15 … updates, each class by its lower end -> parts."""
    busy_s: float = 0.0
    """From its first update or sum to its last, to about a beat."""
    dropped: int = 0
    returned: int = 0
    """Parts that came too late for their step (backup), and pieces that came back from workers that are gone."""
    skipped: int = 0
    """Updates that this server passed over: their gradients were not finite."""
    samples: dict[str, int] = field(default_factory=dict)
    """Where it deals (async, backup): worker -> samples of its batches that are in updates."""


@dataclass(frozen=True, kw_only=True)
class Beat(Sign):
    """A worker is alive: its counters so far. Seconds are totals since the first batch."""

    epoch: int = 0
    num_steps: int = 0
    samples: int = 0
    all_samples: int = 0
    """Of all workers, where a batch is cut over them and each knows the whole."""
    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    wait_s: float = 0.0
    total_s: float = 0.0
    sent_bytes: int = 0
    """Of gradients, by this worker, so far; without compress as many as plain_bytes."""
    plain_bytes: int = 0
    step_bytes: float | None = None
    """What it moved in a step, on average (docs/memory.md); None before the first."""
    step_bytes_expected: float | None = None
    """… as it was predicted; None where that cannot be."""
    peak_bytes: int | None = None
    """The most memory that it had for itself at once."""
    peak_bytes_expected: int | None = None
    activation_bytes: int | None = None
    """Of these: what a forward keeps for its backward, and gradients on their way. None: not counted, and not in it."""


@dataclass(frozen=True, kw_only=True)
class Logged(Event):
    """What one worker gave to run.log at `step`, with the number of samples it stands for."""

    step: int
    values: dict[str, float]
    weight: float


@dataclass(frozen=True, kw_only=True)
class Metric(Event):
    """run.log averaged over the workers."""

    step: int
    values: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class StepLost(Event):
    """A step did not meet; nothing was applied; `batches` are yielded again."""

    step: int
    batches: int
    reason: str
    peers: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class UpdateSkipped(Event):
    """The gradient of step `step` was not finite, and nobody made its update (nonfinite=skip). Told by one worker; `total` are those that it
    told of so far."""

    step: int
    reason: str
    total: int


@dataclass(frozen=True, kw_only=True)
class WorkersBack(Event):
    """Workers that had been killed made a step again, `pause_s` after the loss."""

    ranks: list[int]
    step: int
    pause_s: float


@dataclass(frozen=True, kw_only=True)
class EpochDone(Event):
    """The ledger of one epoch of one loader: samples committed, out of the epoch's order."""

    epoch: int
    committed: int
    expected: int | None
    loader: int = 0


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """A run goes on from a checkpoint that `saved_by` workers wrote."""

    step: int
    path: str
    saved_by: int
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class StopAsked(Event):
    """Somebody asked for the run's end: it stops at the next step, with a checkpoint."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class ShardServed(Event):
    """A shard of the servers' parameters: who leads it since (`moved` says why), and whether its partner has a copy."""

    shard: int
    leader: int
    partner: int
    copied: bool
    moved: str


@dataclass(frozen=True, kw_only=True)
class PhaseChanged(Event):
    """A named rank-0 phase: begun, at `share` of its way, or over."""

    name: str
    state: str
    share: float | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is complete. Seconds are those of the slowest rank; `stall_s` is how long training waited for it."""

    step: int
    path: str
    num_bytes: int
    copy_s: float
    write_s: float
    stall_s: float


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written on all ranks: nothing of it counts. `kept` is the newest complete one, or ""."""

    step: int
    path: str
    reason: str
    kept: str


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """A self-check found something that changes the answer."""

    message: str


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """A worker's script, or a server, raised. `consequence` when it only says that another rank failed first."""

    host: str
    step: int
    code: int
    error: str
    traceback: str
    consequence: bool = False
    role: str = "worker"


@dataclass(frozen=True, kw_only=True)
class Stuck(Event):
    """Process `rank` of `role` holds up the run (None: no one does). `kind` and `reason` as elastic/stuck.py gives them."""

    kind: str
    reason: str
    role: str = "worker"
    """Of all `ranks`."""
    ranks: list[int] = field(default_factory=list)
    host: str = ""
    pid: int = 0
    step: int = 0
    age_s: float = 0.0
    """For how long it has stood still."""
    stack: list[str] = field(default_factory=list)
    """The innermost last."""
    stack_age_s: float = 0.0
    others: list[str] = field(default_factory=list)
    """What the others wait in."""
    stops: bool = True
    """False: only a notice."""
    sure: bool = False
    """It cannot go on by itself, not even a little later."""


@dataclass(frozen=True, kw_only=True)
class Unstuck(Event):
    """What Stuck told of goes on again, after `after_s`."""

    kind: str
    after_s: float
    role: str = "worker"


@dataclass(frozen=True, kw_only=True)
class Entered(Event):
    """A worker's script called echelon.init: from now on other processes may meet it. Told where there are servers."""


@dataclass(frozen=True, kw_only=True)
class Left(Event):
    """A worker's script came to its end."""

    step: int


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    code: int
    reason: str = ""
