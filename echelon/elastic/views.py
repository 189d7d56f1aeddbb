"""What the decision about stuck ranks is made of: what is known of each rank, the times that count, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from echelon.activity import COMING, COMPILING, IMPORTING, Wait
from echelon.control.roster import JOINED, SERVER, WORKER, Who

STOPPED, SILENT, UNREACHABLE = "stopped", "silent", "unreachable"
ASLEEP, BUSY, IN_DATA = "asleep", "busy", "data"
MISMATCH, ABSENT, LINK = "mismatch", "absent", "link"
KINDS = (STOPPED, SILENT, UNREACHABLE, ASLEEP, BUSY, IN_DATA, MISMATCH, ABSENT, LINK)

SLOW_LABELS = (COMPILING, IMPORTING, COMING, "run.save", "checkpoint")
"""What may rightly take minutes on one rank while the others wait."""

BUSY_SHARE = 0.05
"""Of one core; below it a process counts as asleep. The beat thread alone uses a hundredth."""


@dataclass(frozen=True)
class Options:
    """The times of the decision, in seconds."""

    least_s: float = 10.0
    steps: float = 3.0
    """A rank may stand still for the longer of `least_s` and this many median steps."""
    waited_s: float = 3.0
    """Somebody must have waited this long for it."""
    fresh_s: float = 3.0
    """A beat that is older says nothing about now."""
    mismatch_s: float = 5.0
    answer_s: float = 5.0
    """A connection without an answer for so long is dead."""
    link_s: float = 30.0
    """All stand in one operation, and no dead connection is seen."""
    first_s: float = 60.0
    """A rank that computes, before the first step: imports, loading, warming up."""
    slow_s: float = 300.0
    """A rank that does one of SLOW_LABELS."""
    notice_s: float = 30.0


DEFAULT = Options()


@dataclass(frozen=True)
class View:
    """What is known of one worker or server. Ages are seconds before now."""

    rank: int
    host: str = ""
    pid: int = 0
    state: str = JOINED
    step: int = 0
    beat_age_s: float = 0.0
    still_s: float = 0.0
    """Since its progress last moved."""
    doing: str = ""
    site: str = ""
    wait: Wait | None = None
    begun: Mapping[str, int] = field(default_factory=dict)
    links: Mapping[str, float] = field(default_factory=dict)
    """Its connections, "local remote" -> seconds without an answer."""
    cpu_share: float | None = None
    """Cores used since it stands still, or since it fell silent; None when not known."""
    process: str = ""
    """R, S, D, T, … as its host's supervisor last saw it; "" when nobody looked."""
    process_age_s: float | None = None
    """Since its host's supervisor last said anything; None when it never did."""
    role: str = WORKER

    @property
    def who(self) -> Who:
        return Who(self.role, self.rank)

    @property
    def serves(self) -> bool:
        return self.role == SERVER


@dataclass(frozen=True)
class Verdict:
    """Who holds up the run and how. `ranks` may be several, and none for a link that cannot be laid at one's door."""

    kind: str
    ranks: tuple[int, ...]
    reason: str
    others: tuple[str, ...] = ()
    stops: bool = True
    sure: bool = False
    role: str = WORKER
    """Of all `ranks`."""

    @property
    def culprits(self) -> tuple[Who, ...]:
        return tuple(Who(self.role, rank) for rank in self.ranks)


def limit_s(median_step_s: float, options: Options) -> float:
    """How long a rank may stand still."""
    return max(options.steps * median_step_s, options.least_s)


@dataclass(frozen=True)
class Limits:
    """How long a rank may stand still, or say nothing, in this run now."""

    plain_s: float
    busy_s: float
    """… while it computes."""
    slow_s: float
    """… at one of SLOW_LABELS."""
    link_s: float
    notice_s: float

    @classmethod
    def of(cls, views: Sequence[View], median_step_s: float, options: Options) -> Limits:
        plain_s = limit_s(median_step_s, options)
        first_s = 0.0 if any(view.step for view in views) else options.first_s
        return cls(
            plain_s, max(plain_s, first_s), max(plain_s, options.slow_s),
            max(plain_s, options.link_s, first_s), max(plain_s, options.notice_s),
        )  # fmt: skip
