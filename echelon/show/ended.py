"""The last lines of a run that failed: who failed first, in its own words, and whom it took along. Pure."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Sequence
from pathlib import Path

from echelon.control.roster import WORKER
from echelon.launch.blame import Verdict
from echelon.show.lines import COLUMNS, spell_ranks

MAX_TRACEBACK_LINES = 40


def failure_block(
    verdict: Verdict, *, host: str, step: int, log: Path, cause: str, log_tail: Sequence[str], style: bool
) -> list[str]:
    """The block to print last. `step` is the worker's last known one; `log_tail` stands in when it left no traceback."""
    failed = verdict.failed
    where = f"{verdict.who} on {failed.host if failed is not None else host}"
    step = failed.step if failed is not None and failed.step else step
    lines = [
        "",
        _mark(
            f"{where} {_what(verdict)}{f' at step {step}' if step else ''}{_words(verdict, log_tail)}", style
        ),
    ]
    if cause:
        lines += textwrap.wrap(cause, COLUMNS - 4, initial_indent="  ", subsequent_indent="  ")
    if failed is not None and failed.traceback:
        lines += cut(failed.traceback.splitlines(), MAX_TRACEBACK_LINES)
    elif log_tail:
        lines += ["  last lines of its log:", *(f"    {line}" for line in log_tail)]
    lines.append(f"log: {log} ({where}{f', step {step}' if step else ''})")
    if verdict.also:
        lines.append(
            _others(
                verdict, verdict.also, "failed by themselves" if len(verdict.also) > 1 else "failed by itself"
            )
        )
    if verdict.consequences:
        lines.append(_others(verdict, verdict.consequences, "failed as a consequence"))
    return lines


def cut(lines: Sequence[str], limit: int) -> list[str]:
    """At most `limit` lines: of a longer text the middle is left out."""
    if len(lines) <= limit:
        return list(lines)
    head, tail = limit // 4, limit - limit // 4 - 1
    return [*lines[:head], f"  … {len(lines) - head - tail} lines more in the log …", *lines[-tail:]]


def _what(verdict: Verdict) -> str:
    if verdict.failed is None and verdict.exit is not None:
        if verdict.exit.signal:
            number = verdict.exit.signal
            try:
                return f"was killed by {signal.Signals(number).name} (signal {number})"
            except ValueError:
                return f"was killed by signal {number}"
        early = " while it was still needed" if verdict.exit.early else ""
        return f"ended with exit code {verdict.exit.code}{early}"
    return "failed"


def _words(verdict: Verdict, log_tail: Sequence[str]) -> str:
    if verdict.failed is not None:
        return f": {verdict.failed.error}"
    if verdict.exit is not None and verdict.exit.signal:
        return ""
    told = _exception(log_tail)
    return f": {told}" if told else " and left no exception"


def _exception(log_tail: Sequence[str]) -> str:
    """The line below the last traceback's stack; "" where there is none. What the script printed may stand below it."""
    raised = [i for i, line in enumerate(log_tail) if line.startswith("Traceback ")]
    below = log_tail[raised[-1] + 1 :] if raised else ()
    return next((line for line in below if not line.startswith(" ")), "")


def _others(verdict: Verdict, ranks: Sequence[int], what: str) -> str:
    other = "other " * (verdict.role == WORKER)
    return f"{len(ranks)} {other}worker{'s' * (len(ranks) != 1)} {what} ({spell_ranks(ranks)})"


def _mark(text: str, style: bool) -> str:
    return f"\x1b[1;31m{text}\x1b[0m" if style else text
