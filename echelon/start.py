"""echelon.init: joins the run that started this process, or makes a world of one and shows it."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from echelon import env
from echelon import strategy as strategies
from echelon.control import member as members
from echelon.events import Event, Logged, Metric, Sink
from echelon.run import Run
from echelon.strategy import Strategy

BEAT_S = 0.25

_run: Run | None = None
_last: Run | None = None


def init(
    strategy: str | Strategy | None = None,
    *,
    seed: int | None = None,
    name: str | None = None,
    run_dir: str | Path | None = None,
    **fields: Any,
) -> Run:
    """Joins the run that started this process; alone, a world of one. A second call returns the same Run.

    Fields given here (accumulate=4, …) are the script's defaults: --set, --strategy and --config win over them.
    The random generators of torch, random and numpy are seeded with `seed`. It closes at exit.
    """
    global _run
    if _run is not None:
        return _run
    place, member = env.place(), members.current()
    chosen = _strategy(strategy, seed, fields, member.description if member else {})
    if member is None:
        alone = name or f"python-{datetime.now():%m%d-%H%M%S}"
        place = env.Place(run=alone, run_dir=Path(run_dir) if run_dir else None, host=place.host)
        sink, close = _alone_sink()
    else:
        sink, close = member.emit, _nothing
    _run = Run(place, chosen, member, sink)
    atexit.register(_close, close)
    return _run


def current() -> Run | None:
    """The run of this process, if init was called."""
    return _run


def _strategy(
    given: str | Strategy | None, seed: int | None, fields: dict[str, Any], description: dict[str, Any]
) -> Strategy:
    if isinstance(given, Strategy):
        from_script = given.changed()
    else:
        from_script = strategies.parse(given or "")
    from_script |= {k: strategies.read_field(k, v) for k, v in fields.items()}
    if seed is not None:
        from_script["seed"] = seed
    return strategies.merge(description.get("set_by_user", {}), from_script)


def _nothing() -> None:
    return


def _alone_sink() -> tuple[Sink, Callable[[], None]]:
    """Plain python: the same display as under `echelon run`, in this process; nothing is written to disk."""
    from echelon.show.progress import Display

    display = Display(num_workers=1)
    shown_at = 0.0

    def sink(event: Event) -> None:
        nonlocal shown_at
        if isinstance(event, Logged):
            now = time.monotonic()
            if _run is not None and now - shown_at > BEAT_S:
                shown_at = now
                display.handle(_run.beat())
            event = Metric(time=event.time, step=event.step, values=event.values)
        display.handle(event)

    def close() -> None:
        if _last is not None:
            display.handle(_last.beat())
        display.close()

    return sink, close


def _close(close: Callable[[], None]) -> None:
    global _run, _last
    if _run is not None:
        _last, _run = _run, None
        _last.close()
        close()
