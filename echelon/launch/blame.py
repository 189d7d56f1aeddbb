"""Which worker or server failed first, what that makes the run's exit code, and who only failed because of it. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from echelon.control.roster import SERVER, WORKER, Who
from echelon.events import Failed
from echelon.failure import sounds_like_a_lost_peer

SETTLE_S = 1.0
SETTLE_CONSEQUENCE_S = 2.0
"""When so far only consequences are known, the cause gets a little longer to show itself."""

LAST_WORDS_S = 0.4

LOST_SERVER = ("PeerLost", "WireError", "WorldError", "ConnectionError", "ConnectionResetError", "ConnectionAbortedError",
               "ConnectionRefusedError", "BrokenPipeError", "EOFError")  # fmt: skip
"""What a worker raises when the other end of its connection is gone. When a server is, that is why."""


@dataclass(frozen=True)
class Exit:
    """A worker's or server's end as the kernel told it. `ours`: we had asked it to end."""

    rank: int
    code: int
    time: float
    ours: bool = False
    peak_rss_bytes: int = 0
    early: bool = False
    """A server that was still needed: its end is a failure, whatever its code."""
    spared: bool = False
    """The run goes on without it."""

    @property
    def failed(self) -> bool:
        return (self.code != 0 or self.early) and not self.spared

    @property
    def signal(self) -> int:
        """The signal that ended it, 0 when it was none."""
        return self.code - 128 if 128 < self.code < 193 else 0


@dataclass(frozen=True)
class Verdict:
    """The first failure: its process and code, and its own words if it left any."""

    rank: int
    code: int
    reason: str
    failed: Failed | None
    exit: Exit | None
    consequences: tuple[int, ...] = ()
    """Workers that it took along: they lost a peer, or we ended them."""

    also: tuple[int, ...] = ()
    """Workers that raised errors of their own, later."""

    role: str = WORKER

    @property
    def who(self) -> Who:
        return Who(self.role, self.rank)

    @property
    def step(self) -> int | None:
        return self.failed.step if self.failed is not None else None


def code_of_status(status: int) -> int:
    """waitpid's status as a shell would say it: 128+n for signal n."""
    number = status & 0x7F
    return 128 + number if number else status >> 8


def judge(
    exits: Mapping[int, Exit], failures: Iterable[Failed], servers: Mapping[int, Exit] | None = None
) -> Verdict | None:
    """The first failure out of everything known now, or None when nobody failed. `exits` are the workers'.

    Causes come before consequences, and among equals the earlier one: a worker that says "peer lost", or that we
    ended, is the first failure only if there is no other. When a server is gone, so is a worker that lost a connection.
    """
    said: dict[Who, Failed] = {}
    for failed in failures:
        if failed.rank is not None:
            said.setdefault(Who(failed.role, failed.rank), failed)
    ends = {Who(WORKER, rank): end for rank, end in exits.items()}
    ends |= {Who(SERVER, rank): end for rank, end in (servers or {}).items()}
    guilty = {*said, *(who for who, end in ends.items() if end.failed)}
    no_server = any(who.role == SERVER and _class(said.get(who), ends.get(who)) == CAUSE for who in guilty)
    candidates = [
        (_class(said.get(who), ends.get(who), no_server), _when(said.get(who), ends.get(who)), who)
        for who in sorted(guilty)
    ]
    if not candidates or min(candidates)[0] == ENDED_BY_US:
        return None
    _, _, first = min(candidates)
    failed_first, end = said.get(first), ends.get(first)
    workers = [(kind, who) for kind, _, who in sorted(candidates) if who != first and who.role == WORKER]
    also = tuple(who.rank for kind, who in workers if kind == CAUSE and who in said)
    taken = tuple(sorted(who.rank for _, who in workers if who.rank not in also))
    return Verdict(
        first.rank, _code(failed_first, end), _reason(failed_first, end), failed_first, end, taken, also, first.role
    )  # fmt: skip


def settle_s(
    exits: Mapping[int, Exit],
    failures: Sequence[Failed],
    num_workers: int,
    servers: Mapping[int, Exit] | None = None,
) -> float:
    """How long after the first failure the others may still speak, before all are ended."""
    said = {failed.rank for failed in failures if failed.role == WORKER}
    silent = [end for end in exits.values() if end.code != 0 and not end.signal and end.rank not in said]
    if len(exits) == num_workers:
        return LAST_WORDS_S if silent else 0.0
    verdict = judge(exits, failures, servers)
    only_consequences = verdict is not None and verdict.failed is not None and verdict.failed.consequence
    return SETTLE_CONSEQUENCE_S if only_consequences else SETTLE_S


CAUSE, CONSEQUENCE, ENDED_BY_US = 0, 1, 2


def _class(failed: Failed | None, end: Exit | None, no_server: bool = False) -> int:
    if failed is not None:
        lost = failed.consequence or sounds_like_a_lost_peer(failed.error)
        lost = lost or (no_server and failed.role == WORKER and failed.error.startswith(LOST_SERVER))
        return CONSEQUENCE if lost else CAUSE
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
    return end.code or 1


def _reason(failed: Failed | None, end: Exit | None) -> str:
    if failed is not None:
        return failed.error
    assert end is not None
    if end.signal:
        try:
            return f"killed by {signal.Signals(end.signal).name}"
        except ValueError:
            return f"killed by signal {end.signal}"
    if end.early and not end.code:
        return "it ended (exit code 0) while it was still needed"
    return f"exit code {end.code} without an exception"
