"""A script run in this one process up to where it would train, as worker 0 of a run whose other workers are pretended.

Models are split and cut by the code that does it in a run, so what is told is what would happen, refusals included. Nothing is
trained, sent or written. The script is left where enough is known:

1. at the end of a `run.prepare` after which there are a model and an optimizer
2. under pipeline, where a cut needs inputs: inside the first `run.step`
3. else where it would begin to train: its first batch, its first forward
4. at its own end
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from echelon import build, env, failure, role, start
from echelon import strategy as strategies
from echelon.comm import echo
from echelon.errors import EchelonError, LoopError, UsageError
from echelon.event import Event
from echelon.events import Warned
from echelon.explain import words
from echelon.launch.local import Job
from echelon.mesh.memory import Training
from echelon.parallel import needs
from echelon.piped import Piped
from echelon.run import Run
from echelon.strategy import Strategy


class _Enough(BaseException):
    """The script has shown what was to be seen. No Exception: a script that catches those must not catch this."""


def rehearse(job: Job, set_by_user: dict[str, Any], explain: bool) -> list[str]:
    """The plan as lines. What the script prints goes to stderr. SystemExit of a script that leaves with a code before it prepares a
    model; whatever it raises; UsageError for one that never prepares."""
    rehearsal = Rehearsal(job)
    start.rehearse(set_by_user, rehearsal.open)
    script = [*(["-m"] if job.module else []), job.script, *job.args]
    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(_Enough):
        _follow(script)
    if rehearsal.run is None or rehearsal.training is None:
        missing = "run.prepare(model, …)" if rehearsal.run is not None else "echelon.init()"
        raise UsageError(
            f"{job.script} came to its end without {missing}: there is nothing to plan",
            remedy="A plan is made of the model that the script prepares: run = echelon.init(), then run.prepare(model, optimizer, "
            "loader). Arguments of the script go behind its name.",
        )
    return words.lines(rehearsal.run, job, rehearsal.training, explain)


def _follow(script: list[str]) -> None:
    try:
        role.run_script(script)
    except SystemExit as leaving:
        if failure.exit_code(leaving):
            raise
    except LoopError as refused:  # a loop that this strategy cannot have
        raise UsageError(refused.message, remedy=refused.remedy) from None
    except EchelonError:
        raise
    except Exception as error:
        told = failure.describe(error, rank=0, host=env.place().host, step=0, run="plan")
        print(told.traceback, file=sys.stderr)
        raise SystemExit(failure.exit_code(error)) from None


class Rehearsal:
    """One a process."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.run: Run | None = None
        self.training: Training | None = None
        """Bytes of what was prepared, before a pipeline drops what is of other stages; None until there is a model."""

    def open(self, chosen: Strategy) -> Run:
        """What echelon.init gives the script."""
        strategies.require_servers(chosen, self.job.num_servers)
        place = dataclasses.replace(env.place(), run="plan", run_dir=None, world_size=self.job.num_workers)
        if chosen.form == "sharded":
            echo.open_torch(place.rank, place.world_size)  # fully_shard asks torch who is there
        self.run = run = Run(place, chosen, None, _heard, world=build.rehearsed(place, chosen))
        inner = run.prepared.prepare

        def prepare(objects: tuple[Any, ...], loader_options: dict[str, Any]) -> Any:
            made = inner(objects, loader_options)
            self._prepared(run)
            return made

        run.prepared.prepare = prepare  # type: ignore[method-assign]
        run.machine.at_first_begin.append(lambda part: None if run.prepared.piped else _enough())
        return run

    def _prepared(self, run: Run) -> None:
        found = run.prepared
        if not found.models:
            return
        optimizers = [o.optimizer for o in run.machine.optimizers]
        self.training = needs.training(found.models, optimizers, ema=bool(run.strategy.ema))
        if found.piped:
            for piped in found.piped.values():
                _leave_once_cut(piped)
        elif optimizers:
            _enough()
        else:
            for model in found.models:
                model.register_forward_pre_hook(_at_forward)


def _leave_once_cut(piped: Piped) -> None:
    inner: Callable[..., None] = piped.ready

    def ready(*args: Any) -> None:
        inner(*args)
        _enough()

    piped.ready = ready  # type: ignore[method-assign, assignment]


def _at_forward(module: nn.Module, args: Any) -> None:
    _enough()


def _enough() -> NoReturn:
    raise _Enough


def _heard(event: Event) -> None:
    if isinstance(event, Warned):
        print(f"echelon: {event.message}", file=sys.stderr)
