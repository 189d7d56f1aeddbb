"""Is the run stuck, and who holds it up? Pure: a decision with its reason, out of what every rank last said.

Waits make a graph: a rank that waits in operation n of a group waits for every rank that has not begun n there. Whoever
does not wait himself at its end holds up the others; a circle means that ranks stand in different collectives. A rank
that moves, or that is in a named phase, is never blamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.activity import ANYBODY, DATA, ENDED, PHASE
from echelon.control.roster import JOINED
from echelon.elastic import deadlink
from echelon.elastic.views import (
    ABSENT,
    ASLEEP,
    BUSY,
    BUSY_SHARE,
    DEFAULT,
    IN_DATA,
    KINDS,
    LINK,
    MISMATCH,
    SILENT,
    SLOW_LABELS,
    STOPPED,
    UNREACHABLE,
    Limits,
    Options,
    Verdict,
    View,
)  # fmt: skip

HOST_SLACK_S = 3.0
"""A host's supervisor speaks once a second, and may have done so a little after its rank's last beat."""


def decide(views: Sequence[View], median_step_s: float, options: Options = DEFAULT) -> Verdict | None:
    """Who holds up the run now, or None."""
    limits = Limits.of(views, median_step_s, options)
    here = [view for view in views if view.state == JOINED]
    heard = [view for view in here if not _silent(view, limits)]
    waits = {
        view.rank: _missing(view, views)
        for view in here
        if view.wait is not None and view.beat_age_s < options.fresh_s
    }
    return (
        _unheard(here, heard, waits, limits, options)
        or _crossed(views, waits, options)
        or _idle(views, waits, limits, options)
        or _broken(here, waits, limits, options)
        or _starved(here, limits)
    )


# a rank from which nothing comes


def _silent(view: View, limits: Limits) -> bool:
    return view.beat_age_s >= limits.plain_s


def _unheard(
    here: Sequence[View],
    heard: Sequence[View],
    waits: Mapping[int, set[int]],
    limits: Limits,
    options: Options,
) -> Verdict | None:
    found: list[tuple[View, str]] = []
    for view in here:
        held = _held_up(view, heard, waits, options)
        if not _silent(view, limits) or view.beat_age_s < _silence_s(view, held, limits):
            continue
        if held or not heard:
            found.append((view, _kind_of_silence(view, limits)))
    if not found:
        return None
    view, kind = max(found, key=lambda pair: (KINDS[::-1].index(pair[1]), pair[0].beat_age_s))
    alike = tuple(v.rank for v, k in found if k == kind)
    return Verdict(kind, alike, _why_silent(view, kind), _others(here, waits, alike), sure=kind == STOPPED)


def _silence_s(view: View, held: Sequence[View], limits: Limits) -> float:
    """How long this one may say nothing: what burns CPU may be long work that holds the GIL.

    Its last word may be older than its phase: those who wait for it elsewhere have seen the end of that.
    """
    if view.process in ("T", "t"):
        return limits.plain_s
    works = (view.cpu_share or 0.0) > BUSY_SHARE
    in_phase = all(other.wait is not None and other.wait.group == "phase" for other in held)
    if view.doing.startswith(PHASE) and in_phase:
        return float("inf") if works else limits.plain_s
    if view.doing in SLOW_LABELS:
        return limits.slow_s
    return limits.busy_s if works else limits.plain_s


def _held_up(
    view: View, heard: Sequence[View], waits: Mapping[int, set[int]], options: Options
) -> list[View]:
    """Who waits for it. Having begun an operation helps nobody if the process stands still in it."""
    return [
        other
        for other in heard
        if other.rank in waits
        and other.wait is not None
        and other.wait.for_s >= options.waited_s
        and (view.rank in waits[other.rank] or not waits[other.rank])
    ]


def _kind_of_silence(view: View, limits: Limits) -> str:
    host_silent_s = limits.plain_s - HOST_SLACK_S
    if view.process_age_s is not None and view.process_age_s >= host_silent_s:
        return UNREACHABLE
    return STOPPED if view.process in ("T", "t") else SILENT


def _why_silent(view: View, kind: str) -> str:
    age = f"{view.beat_age_s:.0f} s"
    if kind == STOPPED:
        return f"its process is stopped since {age} (SIGSTOP, or a debugger); kill -CONT {view.pid} lets it go on"
    if kind == UNREACHABLE:
        return f"nothing was heard of it nor of its host for {age}: the host is down, or the link to it"
    if view.process == "D":
        return f"no word for {age}: the kernel holds its process (state D: a disk or a network file system)"
    share = f", {view.cpu_share:.0%} of a core" if view.cpu_share is not None else ""
    state = f"its process runs (state {view.process}{share}) but" if view.process else "it"
    return f"{state} says nothing for {age}: code that holds the GIL, or a machine that swaps"


# ranks that wait for each other


def _missing(view: View, views: Sequence[View]) -> set[int]:
    """Ranks that have not begun what `view` waits in; those that ended among them."""
    wait = view.wait
    assert wait is not None
    if wait.group == "phase":
        return {0} - {view.rank}
    if wait.number == ANYBODY:
        alike = {
            v.rank for v in views if v.state == JOINED and v.wait is not None and v.wait.group == wait.group
        }
        return {v.rank for v in views} - alike - {view.rank}
    return {v.rank for v in views if v.begun.get(wait.group, 0) < wait.number} - {view.rank}


def _crossed(views: Sequence[View], waits: Mapping[int, set[int]], options: Options) -> Verdict | None:
    """Ranks in different collectives: each waits for one that waits for it; or one that ended is waited for."""
    by_rank = {view.rank: view for view in views}
    steady = {
        rank: missing
        for rank, missing in waits.items()
        if (wait := by_rank[rank].wait) is not None
        and min(wait.for_s, by_rank[rank].still_s) >= options.mismatch_s
    }
    circle = _circle(steady) or _unlike(steady, by_rank)
    if circle:
        reason = "they wait in different collectives, none of which can end"
        return Verdict(MISMATCH, tuple(circle), reason, _others(views, waits, ()), sure=True)
    for rank, missing in sorted(steady.items()):
        gone = sorted(r for r in missing if _ended(by_rank[r]))
        if gone:
            view = by_rank[gone[0]]
            reason = (
                f"its script came to its end after step {view.step}, and worker {rank} still waits for it"
            )
            return Verdict(ABSENT, tuple(gone), reason, _others(views, waits, tuple(gone)), sure=True)
    return None


def _ended(view: View) -> bool:
    return view.state != JOINED or (view.doing == ENDED and view.wait is None)


def _circle(edges: Mapping[int, set[int]]) -> list[int]:
    """Ranks each of which waits for the next, the last for the first; [] when there are none."""
    over: set[int] = set()
    for start in sorted(edges):
        path: list[int] = []
        at: int | None = start
        while at is not None and at not in over and at not in path:
            path.append(at)
            at = next((rank for rank in sorted(edges.get(at, ())) if rank in edges), None)
        if at is not None and at in path:
            return path[path.index(at) :]
        over |= set(path)
    return []


def _unlike(steady: Mapping[int, set[int]], by_rank: Mapping[int, View]) -> list[int]:
    """Two ranks in one operation of a group that is not the same one: other kind or size."""
    seen: dict[tuple[str, int], int] = {}
    for rank in sorted(steady):
        wait = by_rank[rank].wait
        assert wait is not None
        if wait.number == ANYBODY:
            continue
        first = seen.setdefault((wait.group, wait.number), rank)
        there = by_rank[first].wait
        assert there is not None
        if (there.what, there.num_bytes) != (wait.what, wait.num_bytes):
            return [first, rank]
    return []


# a rank that does not wait and does not move


def _idle(
    views: Sequence[View], waits: Mapping[int, set[int]], limits: Limits, options: Options
) -> Verdict | None:
    found = [
        view
        for view in views
        if view.state == JOINED
        and view.wait is None
        and view.beat_age_s < options.fresh_s
        and (held := [o for o in _held_up(view, views, waits, options) if view.rank in waits[o.rank]])
        and view.still_s >= _stillness_s(view, held, limits)
    ]
    if not found:
        return None
    worst = max(found, key=lambda view: view.still_s)
    kind = _kind_of_stillness(worst)
    alike = tuple(view.rank for view in found if _kind_of_stillness(view) == kind)
    return Verdict(kind, alike, _why_still(worst, kind), _others(views, waits, alike))


def _stillness_s(view: View, held: Sequence[View], limits: Limits) -> float:
    if view.doing.startswith(PHASE):
        return float("inf")
    if view.doing in SLOW_LABELS:
        return limits.slow_s
    before_init = all(other.wait is not None and other.wait.group == "start" for other in held)
    return limits.busy_s if before_init or _kind_of_stillness(view) == BUSY else limits.plain_s


def _kind_of_stillness(view: View) -> str:
    if view.doing == DATA:
        return IN_DATA
    return BUSY if (view.cpu_share or 0.0) > BUSY_SHARE else ASLEEP


def _why_still(view: View, kind: str) -> str:
    age = f"{view.still_s:.0f} s"
    where = f" in {view.doing}" if view.doing in SLOW_LABELS or view.doing.startswith("run.") else ""
    if kind == IN_DATA:
        return f"it waits for its next batch since {age}"
    words = "computes" if kind == BUSY else "sleeps"
    hint = "; long work of rank 0 alone belongs into `with run.phase(…)`" if view.rank == 0 else ""
    return f"it {words}{where} since {age} and does not come{hint}"


# everybody came, and nothing moves


def _broken(
    here: Sequence[View], waits: Mapping[int, set[int]], limits: Limits, options: Options
) -> Verdict | None:
    """All wait, and those for whom the others wait are together in their operation, which does not end."""
    stands = [view for view in here if view.rank in waits and not waits[view.rank]]
    if len(waits) < len(here) or not stands or any(_is_ours(view) for view in stands):
        return None
    dead = deadlink.dead_links(here, options.answer_s)
    least_s = limits.plain_s if dead else limits.link_s
    if any(view.wait is None or min(view.wait.for_s, view.still_s) < least_s for view in stands):
        return None
    wait = stands[0].wait
    assert wait is not None
    others = _others(here, waits, ())
    if dead:
        return Verdict(LINK, tuple(sorted((dead[0].rank, dead[0].peer))), deadlink.told(dead, here), others)
    if wait.number == ANYBODY:
        return None
    reason = f"every worker waits, in {wait.what} since {wait.for_s:.0f} s, and nothing moves: a link between them is dead"
    return Verdict(LINK, (), reason, others)


def _is_ours(view: View) -> bool:
    """It waits for rank 0's word or for others to come, over the coordinator: no link between workers is in it."""
    return view.wait is not None and view.wait.group in ("phase", "start")


def _starved(here: Sequence[View], limits: Limits) -> Verdict | None:
    """Nobody waits for anybody, but all wait for data: worth a notice, no more."""
    starved = [v for v in here if v.doing == DATA and v.still_s >= limits.notice_s and v.wait is None]
    if not here or len(starved) != len(here):
        return None
    worst = max(here, key=lambda view: view.still_s)
    return Verdict(IN_DATA, tuple(v.rank for v in here), _why_still(worst, IN_DATA), stops=False)


# words


def _others(views: Sequence[View], waits: Mapping[int, set[int]], culprits: Sequence[int]) -> tuple[str, ...]:
    lines = []
    for view in views:
        if view.rank in waits and view.rank not in culprits and view.wait is not None:
            number = f" (number {view.wait.number})" if view.wait.number != ANYBODY else ""
            lines.append(
                f"worker {view.rank} ({view.host}:{view.pid}) waits in {view.wait.what}{number} "
                f"since {view.wait.for_s:.0f} s" + (f" at {view.site}" if view.site else "")
            )
    return tuple(lines)
