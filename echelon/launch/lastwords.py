"""What is told last about a worker or server that failed first, here or on another host."""

from __future__ import annotations

import contextlib
from pathlib import Path

from echelon.events import ProcessEnded
from echelon.launch import cause
from echelon.launch.blame import Exit, Verdict
from echelon.launch.streams import tail
from echelon.show.ended import failure_block


def why(end: Exit | None, cgroup: str, before: cause.Memory) -> str:
    """The likely cause of a signal, "" when it was none. `cgroup` is what the worker's was, "" when not known."""
    if end is None or not end.signal:
        return ""
    after = cause.read(cgroup or cause.cgroup_of())
    return cause.likely_cause(end.signal, before, after, end.peak_rss_bytes)


def here(verdict: Verdict, *, host: str, step: int, log: Path, because: str, style: bool) -> list[str]:
    """The block about a worker of this host."""
    return failure_block(
        verdict, host=host, step=step, log=short(log), cause=because, log_tail=tail(log), style=style
    )


def far(
    verdict: Verdict, end: ProcessEnded | None, *, host: str, step: int, log: Path, style: bool
) -> list[str]:
    """The block about a worker of another host, in the words of its supervisor."""
    if end is None:
        return failure_block(
            verdict, host=host, step=step, log=Path(f"{host}:{log}"), cause="", log_tail=[], style=style
        )
    because = f"Its pid was {end.pid}. {end.cause}" if verdict.failed is None else ""
    return failure_block(
        verdict, host=host, step=step, log=Path(f"{host}:{end.log or log}"), cause=because, log_tail=end.log_tail,
        style=style,
    )  # fmt: skip


def short(path: Path) -> Path:
    with contextlib.suppress(ValueError):
        return path.relative_to(Path.cwd())
    return path
