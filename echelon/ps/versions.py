"""A step is never torn: who has reported what, and what follows. Pure.

A part is whole when every server has it; an update is complete when every server applied it; until then each keeps the
version before. Whether gradients are finite, and how far they are clipped, is decided over all ranges at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from echelon.ps.decisions import Part

NanRule = Literal["refuse", "skip", "pass"]
"""A gradient that is not finite: stop the run, leave the step out, or apply it."""


class Arrivals:
    """Parts that some servers have. Told twice is told once."""

    def __init__(self, servers: Iterable[int]) -> None:
        self.servers = frozenset(servers)
        self._have: dict[Part, set[int]] = {}

    def report(self, server: int, part: Part) -> bool:
        """True once: when the last server has it."""
        if server not in self.servers:
            raise ValueError(f"server {server} is not one of {sorted(self.servers)}")
        have = self._have.setdefault(part, set())
        have.add(server)
        if have != self.servers:
            return False
        del self._have[part]
        return True

    def forget(self, worker: int, before: int) -> list[Part]:
        """What came from this worker's incarnations below `before` and is not whole: servers drop it."""
        gone = [p for p in self._have if p.worker == worker and p.incarnation < before]
        for part in gone:
            del self._have[part]
        return gone


def agreed(applied: Mapping[int, int]) -> int:
    """The version that all ranges can have, from each server's own: an update is complete if every server applied it, even
    if none of them heard of it; every other goes back."""
    return min(applied.values())


class Completion:
    """Which servers applied which update, in this term: a report that was under way while ranges went back is void."""

    def __init__(self, servers: Iterable[int], version: int = 0, term: int = 0) -> None:
        self.term = term
        self._applied = dict.fromkeys(servers, version)

    def report(self, server: int, version: int, term: int = 0) -> int:
        """This server has `version` now; gives the version that every server has."""
        if term == self.term:
            self._applied[server] = max(self._applied[server], version)
        return self.committed

    @property
    def committed(self) -> int:
        return agreed(self._applied)

    def behind(self) -> tuple[int, ...]:
        """Servers that others wait for."""
        most = max(self._applied.values())
        return tuple(sorted(s for s, version in self._applied.items() if version < most))

    def rollback(self, version: int, term: int) -> None:
        """A new term begins, and every server has this version in it."""
        self.term = term
        self._applied = dict.fromkeys(self._applied, version)


class Kept:
    """The versions of its ranges that one server holds: the newest, and those that it may have to go back to."""

    def __init__(self, version: int = 0) -> None:
        self.versions: tuple[int, ...] = (version,)

    @property
    def newest(self) -> int:
        return self.versions[-1]

    def apply(self, step: int) -> None:
        """Version `step` stays beside the one that update `step` makes."""
        if step != self.newest:
            raise ValueError(f"update {step} on version {self.newest}: it would be lost or counted twice")
        self.versions = (*self.versions, step + 1)

    def commit(self, version: int) -> tuple[int, ...]:
        """Every server has `version`: those before it may be freed."""
        if version > self.newest:
            raise ValueError(f"version {version} is complete everywhere, but here is {self.newest}")
        freed = tuple(v for v in self.versions if v < version)
        self.versions = self.versions[len(freed) :]
        return freed

    def rollback(self, version: int) -> tuple[int, ...]:
        """Back to `version`: the later ones may be freed."""
        if version not in self.versions:
            raise ValueError(f"version {version} is not kept: here are {self.versions}")
        at = self.versions.index(version) + 1
        gone, self.versions = self.versions[at:], self.versions[:at]
        return gone


@dataclass(frozen=True)
class Summary:
    """What a server tells about the summed gradient of its ranges before anything is applied."""

    finite: bool
    squares: float
    """Sum of the squares; only counts if finite."""


@dataclass(frozen=True)
class Verdict:
    """What every server does with update `step`. Skipped, it counts as an update that moves nothing."""

    step: int
    action: Literal["apply", "skip", "refuse"]
    factor: float
    """Gradients are multiplied by this."""
    norm: float
    reason: str


class Verdicts:
    """Collects summaries until all servers told theirs. Not needed, and not waited for, with nan=pass and no clipping."""

    def __init__(self, servers: Iterable[int], *, nan: NanRule = "pass", clip_norm: float = 0.0) -> None:
        self.servers = tuple(sorted(servers))
        self.nan = nan
        self.clip_norm = clip_norm
        self.term = 0
        self._told: dict[int, dict[int, Summary]] = {}

    @property
    def needed(self) -> bool:
        return self.nan != "pass" or self.clip_norm > 0

    def report(self, server: int, step: int, summary: Summary, term: int = 0) -> Verdict | None:
        """The verdict, when this was the last summary of the step; what is told of another term is void."""
        if term != self.term:
            return None
        told = self._told.setdefault(step, {})
        told[server] = summary
        if any(s not in told for s in self.servers):
            return None
        del self._told[step]
        return verdict(step, {s: told[s] for s in self.servers}, self.nan, self.clip_norm)

    def rollback(self, term: int) -> None:
        """A new term begins: steps without a verdict are computed again."""
        self.term = term
        self._told.clear()


def verdict(step: int, told: Mapping[int, Summary], nan: NanRule, clip_norm: float) -> Verdict:
    """One verdict for all ranges. The sum over servers is exact, so the factor does not depend on their order."""
    broken = sorted(server for server, summary in told.items() if not summary.finite)
    if broken and nan != "pass":
        reason = f"the gradient of step {step} is not finite on server {', '.join(map(str, broken))}"
        return Verdict(step, nan, 0.0, math.nan, reason)
    norm = math.nan if broken else math.sqrt(math.fsum(s.squares for s in told.values()))
    if clip_norm <= 0:
        return Verdict(step, "apply", 1.0, norm, "not clipped")
    factor = clip_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_; NaN stays NaN
    factor = 1.0 if factor > 1.0 else factor
    return Verdict(step, "apply", factor, norm, f"norm {norm:.6g}, clipped to {clip_norm:g}")
