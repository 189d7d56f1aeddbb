"""Is the run stuck, and who holds it up? Pure: a decision with its reason, out of what every rank last said.

Waits make a graph: a rank that waits in operation n of a group waits for every rank that has not begun n there. Whoever
does not wait himself at its end holds up the others; a circle means that ranks stand in different collectives. A rank
that moves, or that is in a named phase, is never blamed. A parameter server that beats is a medium: those who wait for it
wait for the workers that have not begun the same; one that is silent, or that ended, is waited for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.activity import ANYBODY, DATA, ENDED, PHASE, SERVERS, members
from echelon.control.roster import JOINED, WORKER, Who
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

Waits = Mapping[Who, set[Who]]
"""Who waits -> for whom."""

HOST_SLACK_S = 3.0
"""A host's supervisor speaks once a second, and may have done so a little after its rank's last beat."""


def decide(views: Sequence[View], median_step_s: float, options: Options = DEFAULT) -> Verdict | None:
    """Who holds up the run now, or None."""
    limits = Limits.of(views, median_step_s, options)
    here = [view for view in views if view.state == JOINED]
    heard = [view for view in here if not view.serves and not _silent(view, limits)]
    waits = {
        view.who: _missing(view, views, options)
        for view in here
        if view.wait is not None and not view.serves and view.beat_age_s < options.fresh_s
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
    waits: Waits,
    limits: Limits,
    options: Options,
) -> Verdict | None:
    found: list[tuple[View, str]] = []
    for view in here:
        held = _held_up(view, heard, waits, options)
        if not _silent(view, limits) or view.beat_age_s < _silence_s(view, held, limits):
            continue
        if held or not (heard or view.serves):
            found.append((view, _kind_of_silence(view, limits)))
    if not found:
        return None
    view, kind = max(found, key=lambda pair: (KINDS[::-1].index(pair[1]), pair[0].beat_age_s))
    alike = [v for v, k in found if k == kind and v.role == view.role]
    return _verdict(kind, alike, _why_silent(view, kind), here, waits, sure=kind == STOPPED)


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


def _held_up(view: View, heard: Sequence[View], waits: Waits, options: Options) -> list[View]:
    """Who waits for it. Having begun an operation helps nobody if the process stands still in it."""
    return [
        other
        for other in heard
        if other.who in waits
        and other.wait is not None
        and other.wait.for_s >= options.waited_s
        and (view.who in waits[other.who] or not (waits[other.who] or view.serves))
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


def _missing(view: View, views: Sequence[View], options: Options) -> set[Who]:
    """Those who have not begun what `view` waits in; those that ended among them. Servers only if nothing comes from them."""
    wait = view.wait
    assert wait is not None
    if wait.group == "phase":
        return {Who(WORKER, 0)} - {view.who}
    some = members(wait.group)
    workers = [v for v in views if not v.serves and (some is None or v.rank in some)]
    servers = {
        v.who
        for v in asked_servers(wait.group, views)
        if v.state != JOINED or v.beat_age_s >= options.fresh_s
    }
    if wait.number == ANYBODY and is_for_servers(
        wait.group
    ):  # what well servers wait for themselves is not known
        there = {
            v.who for v in workers if not (_ended(v) or (v.wait is not None and is_for_servers(v.wait.group)))
        }
        return servers or there - {view.who}
    if wait.number == ANYBODY:
        alike = {
            v.who for v in workers if v.state == JOINED and v.wait is not None and v.wait.group == wait.group
        }
        return {v.who for v in workers} - alike - {view.who}
    return {v.who for v in workers if v.begun.get(wait.group, 0) < wait.number} - {view.who} | servers


def is_for_servers(group: str) -> bool:
    return group == SERVERS or group.startswith(f"{SERVERS} ")


def asked_servers(group: str, views: Sequence[View]) -> list[View]:
    """The servers that a wait in `group` is for: `servers` all, `servers 0,2` these; none for any other group."""
    if not is_for_servers(group):
        return []
    named = set(group.removeprefix(SERVERS).strip().split(",")) - {""}
    return [view for view in views if view.serves and (not named or str(view.rank) in named)]


def _crossed(views: Sequence[View], waits: Waits, options: Options) -> Verdict | None:
    """Ranks in different collectives: each waits for one that waits for it; or one that ended is waited for."""
    by_who = {view.who: view for view in views}
    steady = {
        who: missing
        for who, missing in waits.items()
        if (wait := by_who[who].wait) is not None
        and min(wait.for_s, by_who[who].still_s) >= options.mismatch_s
    }
    circle = _circle(steady) or _unlike(steady, by_who)
    if circle:
        reason = "they wait in different collectives, none of which can end"
        ranks = tuple(who.rank for who in circle)
        return Verdict(MISMATCH, ranks, reason, _others(views, waits, ()), sure=True)
    for who, missing in sorted(steady.items()):
        gone = [view for w in sorted(missing) if (view := by_who.get(w)) is not None and _ended(view)]
        if gone:
            first, what = gone[0], "it" if gone[0].serves else "its script"
            reason = f"{what} came to its end after step {first.step}, and {who} still waits for it"
            alike = [view for view in gone if view.role == first.role]
            return _verdict(ABSENT, alike, reason, views, waits, sure=True)
    return None


def _ended(view: View) -> bool:
    return view.state != JOINED or (view.doing == ENDED and view.wait is None)


def _circle(edges: Waits) -> list[Who]:
    """Ranks each of which waits for the next, the last for the first; [] when there are none."""
    over: set[Who] = set()
    for start in sorted(edges):
        path: list[Who] = []
        at: Who | None = start
        while at is not None and at not in over and at not in path:
            path.append(at)
            at = next((who for who in sorted(edges.get(at, ())) if who in edges), None)
        if at is not None and at in path:
            return path[path.index(at) :]
        over |= set(path)
    return []


def _unlike(steady: Waits, by_who: Mapping[Who, View]) -> list[Who]:
    """Two ranks in one operation of a group that is not the same one: other kind or size."""
    seen: dict[tuple[str, int], Who] = {}
    for who in sorted(steady):
        wait = by_who[who].wait
        assert wait is not None
        if wait.number == ANYBODY:
            continue
        first = seen.setdefault((wait.group, wait.number), who)
        there = by_who[first].wait
        assert there is not None
        if (there.what, there.num_bytes) != (wait.what, wait.num_bytes):
            return [first, who]
    return []


# a rank that does not wait and does not move


def _idle(views: Sequence[View], waits: Waits, limits: Limits, options: Options) -> Verdict | None:
    found = [
        view
        for view in views
        if view.state == JOINED
        and view.wait is None
        and view.beat_age_s < options.fresh_s
        and (held := [o for o in _held_up(view, views, waits, options) if view.who in waits[o.who]])
        and view.still_s >= _stillness_s(view, held, limits)
    ]
    if not found:
        return None
    worst = max(found, key=lambda view: view.still_s)
    kind = _kind_of_stillness(worst)
    alike = [view for view in found if _kind_of_stillness(view) == kind]
    return _verdict(kind, alike, _why_still(worst, kind), views, waits)


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


def _broken(here: Sequence[View], waits: Waits, limits: Limits, options: Options) -> Verdict | None:
    """All wait, and those for whom the others wait are together in their operation, which does not end."""
    stands = [view for view in here if view.who in waits and not waits[view.who]]
    num_workers = sum(1 for view in here if not view.serves)
    if len(waits) < num_workers or not stands or any(_is_ours(view) for view in stands):
        return None
    dead = deadlink.dead_links(here, options.answer_s)
    least_s = limits.plain_s if dead else limits.link_s
    if any(view.wait is None or min(view.wait.for_s, view.still_s) < least_s for view in stands):
        return None
    wait = stands[0].wait
    assert wait is not None
    others = _others(here, waits, ())
    if dead:
        ends = sorted((dead[0].who, dead[0].peer))
        ranks = tuple(end.rank for end in ends) if all(end.role == WORKER for end in ends) else ()
        return Verdict(LINK, ranks, deadlink.told(dead, here), others)
    hung = [v for v in asked_servers(wait.group, here) if v.still_s >= limits.link_s]
    if hung:
        kind = _kind_of_stillness(hung[0])
        reason = f"every worker waits for it, in {wait.what} since {wait.for_s:.0f} s; it beats, and does nothing for them"
        return _verdict(kind, [v for v in hung if _kind_of_stillness(v) == kind], reason, here, waits)
    if wait.number == ANYBODY or is_for_servers(wait.group):
        return None
    reason = f"every worker waits, in {wait.what} since {wait.for_s:.0f} s, and nothing moves: a link between them is dead"
    return Verdict(LINK, (), reason, others)


def _is_ours(view: View) -> bool:
    """It waits for rank 0's word or for others to come, over the coordinator: no link between workers is in it."""
    return view.wait is not None and view.wait.group in ("phase", "start")


def _starved(here: Sequence[View], limits: Limits) -> Verdict | None:
    """Nobody waits for anybody, but all wait for data: worth a notice, no more."""
    workers = [view for view in here if not view.serves]
    starved = [v for v in workers if v.doing == DATA and v.still_s >= limits.notice_s and v.wait is None]
    if not workers or len(starved) != len(workers):
        return None
    worst = max(workers, key=lambda view: view.still_s)
    return Verdict(IN_DATA, tuple(v.rank for v in workers), _why_still(worst, IN_DATA), stops=False)


# words


def _verdict(
    kind: str, alike: Sequence[View], reason: str, views: Sequence[View], waits: Waits, *, sure: bool = False
) -> Verdict:
    """All of `alike`, who have one role, hold up the run in the same way."""
    others = _others(views, waits, [view.who for view in alike])
    return Verdict(kind, tuple(view.rank for view in alike), reason, others, sure=sure, role=alike[0].role)


def _others(views: Sequence[View], waits: Waits, culprits: Sequence[Who]) -> tuple[str, ...]:
    lines = []
    for view in views:
        if view.who in waits and view.who not in culprits and view.wait is not None:
            number = f" (number {view.wait.number})" if view.wait.number != ANYBODY else ""
            lines.append(
                f"{view.who} ({view.host}:{view.pid}) waits in {view.wait.what}{number} "
                f"since {view.wait.for_s:.0f} s" + (f" at {view.site}" if view.site else "")
            )
    return tuple(lines)
