"""What a person reads when a worker or server holds up the run: who, where, for how long, and what the others wait in. Pure."""

from __future__ import annotations

import os
import textwrap

from echelon.events import Stuck, Unstuck
from echelon.show.lines import COLUMNS, spell_ranks

MAX_FRAMES = 8
MAX_OTHERS = 6

HEADS = {
    "stopped": "is stopped",
    "silent": "does not answer",
    "unreachable": "cannot be reached",
    "asleep": "holds up the run",
    "busy": "holds up the run",
    "data": "gets no data",
    "absent": "is not there any more",
}
STARTERS = ("/echelon/role.py:", "<frozen runpy>:")


def stuck_block(event: Stuck, *, log: str, then: str, style: bool, cwd: str) -> list[str]:
    """The block that tells of one incident. `then` says what follows from it; `log` is where its worker writes."""
    lines = ["", _mark(_head(event), style), *_wrap(event.reason.replace(cwd + os.sep, ""), "  ")]
    if event.stack:
        lines += _stack(event, cwd)
    if event.others:
        more = len(event.others) - MAX_OTHERS
        lines.append("  meanwhile:")
        for other in event.others[:MAX_OTHERS]:
            lines += _wrap(other.replace(cwd + os.sep, ""), "    ", "      ")
        lines += [f"    … and {more} more"] if more > 0 else []
    if event.rank is not None:
        lines.append(_cut(f"log: {log} ({event.role} {event.rank} on {event.host}, step {event.step})"))
    return [*lines, *_wrap(then, "")]


def unstuck_line(event: Unstuck) -> str:
    who = f"{event.role} {event.rank}" if event.rank is not None else "the run"
    return f"{who} goes on, {event.after_s:.0f} s after the alarm"


def headline(event: Stuck) -> str:
    """The first line again, as the reason of the run's end."""
    return _head(event)


def _head(event: Stuck) -> str:
    step = f" at step {event.step}" if event.step else " before the first step"
    if event.rank is None:
        who = f"workers {spell_ranks(event.ranks)} are" if event.ranks else "the run is"
        words = "out of step" if event.kind == "mismatch" else "stuck"
        if event.kind == "link" and len(event.ranks) == 2:
            who, words = f"workers {event.ranks[0]} and {event.ranks[1]}", "do not reach each other"
        return f"stuck ({event.kind}): {who} {words}{step}"
    who = f"{event.role} {event.rank} on {event.host} (pid {event.pid})"
    more = (
        f"; so {'does' if len(event.ranks) == 2 else 'do'} {spell_ranks(event.ranks[1:])}"
        if event.ranks[1:]
        else ""
    )
    return f"stuck ({event.kind}): {who} {HEADS.get(event.kind, 'holds up the run')}{step}{more}"


def _stack(event: Stuck, cwd: str) -> list[str]:
    age = f"{event.stack_age_s:.0f} s ago" if event.stack_age_s >= 2.0 else "now"
    frames = [f for f in event.stack if not any(starter in f for starter in STARTERS)]
    lines = [f"  its stack, {age}:"]
    if len(frames) > MAX_FRAMES:
        own = [i for i, f in enumerate(frames[:-MAX_FRAMES]) if not _library(f)]
        lines += [_cut(f"    {_frame(frames[i], cwd)}") for i in own[-1:]] + ["    …"]
    return [*lines, *(_cut(f"    {_frame(frame, cwd)}") for frame in frames[-MAX_FRAMES:])]


def _library(frame: str) -> bool:
    return any(part in frame for part in ("/site-packages/", "/lib/python", "/echelon/", "<frozen"))


def _frame(frame: str, cwd: str) -> str:
    place, _, name = frame.removeprefix(cwd + os.sep).rpartition(" ")
    if not place or frame.startswith("("):
        return frame
    for part in ("/site-packages/", "/lib/python3."):
        if part in place:
            place = (
                place.partition(part)[2].partition("/")[2]
                if part.startswith("/lib")
                else place.partition(part)[2]
            )
    return f"{place} in {name}"


def _cut(line: str) -> str:
    """The end of a long line says more than its beginning."""
    if len(line) <= COLUMNS:
        return line
    indent = len(line) - len(line.lstrip())
    return " " * indent + "…" + line[indent:][-(COLUMNS - indent - 1) :]


def _wrap(text: str, indent: str, later: str | None = None) -> list[str]:
    return textwrap.wrap(
        text, COLUMNS, initial_indent=indent, subsequent_indent=indent if later is None else later,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _mark(text: str, style: bool) -> str:
    return f"\x1b[1;31m{text}\x1b[0m" if style else text
