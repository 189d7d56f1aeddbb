"""Which worker failed first, what that makes the run's exit code, and who only failed because of it. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from echelon.events import Failed
from echelon.failure import sounds_like_a_lost_peer

SETTLE_S = 1.0
SETTLE_CONSEQUENCE_S = 2.0
"""When so far only consequences are known, the cause gets a little longer to show itself."""

LAST_WORDS_S = 0.4


@dataclass(frozen=True)
class Exit:
    """A worker's end as the kernel told it. `ours`: we had asked it to end."""

    rank: int
    code: int
    time: float
    ours: bool = False
    peak_rss_bytes: int = 0

    @property
    def signal(self) -> int:
        """The signal that ended it, 0 when it was none."""
        return self.code - 128 if 128 < self.code < 193 else 0


@dataclass(frozen=True)
class Verdict:
    """The first failure: its worker and code, and its own words if it left any."""

    rank: int
    code: int
    reason: str
    failed: Failed | None
    exit: Exit | None
    consequences: tuple[int, ...] = ()
    """Workers that it took along: they lost a peer, or we ended them."""

    also: tuple[int, ...] = ()
    """Workers that raised errors of their own, later."""

    @property
    def step(self) -> int | None:
        return self.failed.step if self.failed is not None else None


def code_of_status(status: int) -> int:
    """waitpid's status as a shell would say it: 128+n for signal n."""
    number = status & 0x7F
    return 128 + number if number else status >> 8


def judge(exits: Mapping[int, Exit], failures: Iterable[Failed]) -> Verdict | None:
    """The first failure out of everything known now, or None when nobody failed.

    Causes come before consequences, and among equals the earlier one: a worker that says "peer lost", or that we
    ended, is the first failure only if there is no other.
    """
    said: dict[int, Failed] = {}
    for failed in failures:
        if failed.rank is not None:
            said.setdefault(failed.rank, failed)
    candidates: list[tuple[int, float, int]] = []
    for rank in sorted({*said, *(rank for rank, end in exits.items() if end.code != 0)}):
        candidates.append(
            (_class(said.get(rank), exits.get(rank)), _when(said.get(rank), exits.get(rank)), rank)
        )
    if not candidates or min(candidates)[0] == ENDED_BY_US:
        return None
    _, _, first = min(candidates)
    failed_first, end = said.get(first), exits.get(first)
    also = tuple(
        rank for kind, _, rank in sorted(candidates) if rank != first and kind == CAUSE and rank in said
    )
    taken = tuple(sorted(rank for _, _, rank in candidates if rank != first and rank not in also))
    return Verdict(
        first, _code(failed_first, end), _reason(failed_first, end), failed_first, end, taken, also
    )


def settle_s(exits: Mapping[int, Exit], failures: Sequence[Failed], num_workers: int) -> float:
    """How long after the first failure the others may still speak, before all are ended."""
    said = {failed.rank for failed in failures}
    silent = [end for end in exits.values() if end.code != 0 and not end.signal and end.rank not in said]
    if len(exits) == num_workers:
        return LAST_WORDS_S if silent else 0.0
    verdict = judge(exits, failures)
    only_consequences = verdict is not None and verdict.failed is not None and verdict.failed.consequence
    return SETTLE_CONSEQUENCE_S if only_consequences else SETTLE_S


CAUSE, CONSEQUENCE, ENDED_BY_US = 0, 1, 2


def _class(failed: Failed | None, end: Exit | None) -> int:
    if failed is not None:
        return CONSEQUENCE if failed.consequence or sounds_like_a_lost_peer(failed.error) else CAUSE
    assert end is not None
    return ENDED_BY_US if end.ours else CAUSE


def _when(failed: Failed | None, end: Exit | None) -> float:
    times = [found.time for found in (failed, end) if found is not None]
    return min(times)


def _code(failed: Failed | None, end: Exit | None) -> int:
    if end is not None and not end.ours and end.code != 0:
        return end.code
    if failed is not None:
        return failed.code or 1
    assert end is not None
    return end.code


def _reason(failed: Failed | None, end: Exit | None) -> str:
    if failed is not None:
        return failed.error
    assert end is not None
    if end.signal:
        try:
            return f"killed by {signal.Signals(end.signal).name}"
        except ValueError:
            return f"killed by signal {end.signal}"
    return f"exit code {end.code} without an exception"
