"""echelon.init: joins the run that started this process, or makes a world of one and shows it."""

from __future__ import annotations

import atexit
import dataclasses
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from echelon import env, preload
from echelon import strategy as strategies
from echelon.clock import Deadline
from echelon.control import member as members
from echelon.events import Beat, Configured, Entered, Event, Logged, Metric
from echelon.run import Run
from echelon.show import tensorboard
from echelon.show.progress import Display
from echelon.show.summary import closing, short
from echelon.strategy import Strategy

BEAT_S = 0.25
ENTER_S = 10.0

_run: Run | None = None
_last: Run | None = None
_rehearsal: tuple[dict[str, Any], Callable[[Strategy], Run]] | None = None


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
    preload.settle()
    if _rehearsal is not None:
        set_by_user, rehearsed = _rehearsal
        _run = rehearsed(_strategy(strategy, seed, fields, {"set_by_user": set_by_user}))
        return _run
    place, member = env.place(), members.current()
    chosen = _strategy(strategy, seed, fields, member.description if member else {})
    if member is not None:
        strategies.require_servers(chosen, int(member.description.get("num_servers", 0)))
    if chosen.tensorboard:
        tensorboard.require()
    if member is None and env.torchrun() is not None:
        return _under_torchrun(strategy, seed, name, run_dir, fields)
    if member is None:
        alone = name or f"python-{datetime.now():%m%d-%H%M%S}"
        place = env.Place(run=alone, run_dir=Path(run_dir) if run_dir else None, host=place.host)
        shown = Alone(place, chosen)
        _run = Run(place, chosen, None, shown)
        _run.machine.after_apply.append(lambda optimizer: shown.look())
        atexit.register(_close, shown.close)
    else:
        _enter(member)
        _run = Run(place, chosen, member, member.emit)
        _open_torch(_run)
        atexit.register(_close, _nothing)
    if _run.is_main:
        _run.emit(Configured(rank=0, strategy=dataclasses.asdict(chosen)))
    return _run


def _under_torchrun(
    strategy: str | Strategy | None,
    seed: int | None,
    name: str | None,
    run_dir: str | Path | None,
    fields: dict[str, Any],
) -> Run:
    """As a worker of `echelon run`, but rank 0 also brings the coordinator and shows the run."""
    global _run
    from echelon import torchrun

    adopted = torchrun.adopt(name, run_dir)
    member = adopted.member
    chosen = _strategy(strategy, seed, fields, member.description)
    strategies.require_servers(chosen, 0)
    shown: Alone | None = None
    if adopted.folder is not None:
        shown = Alone(member.place, chosen)
        adopted.show(shown.take, shown.tick)

    def close() -> None:
        adopted.close(_last.beat() if _last is not None else Beat())
        if shown is not None:
            shown.close()

    _run = Run(member.place, chosen, member, member.emit)
    _open_torch(_run)
    atexit.register(_close, close)
    if _run.is_main:
        _run.emit(Configured(rank=0, strategy=dataclasses.asdict(chosen)))
    return _run


def _enter(member: members.Member) -> None:
    """Says that others may meet this process from now on: one that is killed before is simply started again."""
    if member.description.get("num_servers", 0):
        member.emit(Entered(rank=member.place.rank))
        member.flush(Deadline.after(ENTER_S))


def _open_torch(run: Run) -> None:
    """torch.distributed's default group, for scripts that call it themselves: where the core carries the gradients it carries
    that as well. gloo and NCCL are torch's own groups already."""
    if run.world.groups.backend == "native":
        from echelon import torch_backend

        run.world.groups.open_torch(torch_backend.NAME)


def rehearse(set_by_user: dict[str, Any], made: Callable[[Strategy], Run]) -> None:
    """From now on init() gives what `made` makes of the strategy: `echelon plan`."""
    global _rehearsal
    _rehearsal = set_by_user, made


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


class Alone:
    """Plain python: the same display as under `echelon run`, in this process. On disk only what was asked for. A Sink."""

    def __init__(self, place: env.Place, chosen: Strategy) -> None:
        folder = place.run_dir or env.runs_dir() / place.run
        self._display = Display(num_workers=place.world_size)
        self._board = tensorboard.TensorBoard(folder / "tensorboard", wanted=chosen.tensorboard)
        self._looked_at = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Logged):
            self.look()
            event = Metric(time=event.time, step=event.step, values=event.values)
        self._display.handle(event)
        self._board(event)

    def take(self, event: Event) -> None:
        """An event of the whole run, under torchrun: the coordinator has averaged what was logged."""
        self._display.handle(event)
        self._board(event)

    def tick(self) -> None:
        self._display.tick()

    def look(self) -> None:
        """Shows how far the script is; called often, does something now and then."""
        now = time.monotonic()
        if _run is not None and now - self._looked_at > BEAT_S:
            self._looked_at = now
            self._display.handle(_run.beat())

    def close(self) -> None:
        """The last words, unless the script raised: then its traceback stays the last thing on the screen."""
        if _last is not None:
            self._display.progress.take(_last.beat(), time.monotonic())
        self._display.close()
        self._board.close()
        if getattr(sys, "last_value", None) is None:
            self._display.say(*closing(self._display.progress))
            if self._board.wanted and self._board.folder.exists():
                self._display.say(f"TensorBoard files: {short(self._board.folder)}")


def _close(close: Callable[[], None]) -> None:
    global _run, _last
    if _run is not None:
        _last, _run = _run, None
        _last.close()
        close()
