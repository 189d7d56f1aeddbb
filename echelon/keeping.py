"""When a run's state is saved, how it stops in good order, and how a resumed script comes back to where it was left.

A checkpoint is taken where the last step is final: when a loop is asked for its next part, when it is over, or where the
script calls run.checkpoint(). A request to stop travels with the gradients, so all ranks hear of it in the same
step, save there, and leave with exit code 75.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon import env, sources
from echelon.build import World
from echelon.checkpoint import handed, load
from echelon.checkpoint.handed import Handed
from echelon.checkpoint.meeting import MemberMeeting, alone
from echelon.checkpoint.saver import Checkpoint, Saver
from echelon.clock import Deadline
from echelon.control.member import Member
from echelon.env import Place
from echelon.errors import PREEMPTED, CheckpointError, LoopError, Preempted, UsageError
from echelon.events import Resumed, Sink, Warned
from echelon.placing import Source
from echelon.prepare.trail import Mark, Trail
from echelon.prepared import Prepared
from echelon.strategy import Strategy
from echelon.whole import Whole, gather

CLOSE_S = 600.0


class Asked:
    """What run.checkpoint() gives in the body of a loop: it is taken at the iteration's end, so that what the script still
    does in it (a scheduler's step) is in it. wait() takes it at once."""

    def __init__(self, keeping: Keeping, step: int, path: str) -> None:
        self._keeping, self.step, self.path = keeping, step, path
        self.checkpoint: Checkpoint | None = None

    @property
    def state(self) -> str:
        """waiting | copying | writing | complete | failed"""
        return self.checkpoint.state if self.checkpoint is not None else "waiting"

    @property
    def error(self) -> str:
        return self.checkpoint.error if self.checkpoint is not None else ""

    def wait(self, deadline: Deadline | None = None) -> Asked:
        """Blocks until it is complete; CheckpointError when it failed."""
        if self.checkpoint is None:
            self._keeping.now()
        if self.checkpoint is None:
            raise UsageError(
                "the checkpoint that was asked for in the middle of a step cannot be waited for before the step",
                remedy="Call run.checkpoint() after optimizer.step().",
            )
        self.checkpoint.wait(deadline)
        return self


@dataclass(frozen=True)
class Past:
    """What run.checkpoint() gives on the way back: the one it made in the run that is resumed."""

    step: int
    path: str
    state: str = "complete"
    error: str = ""

    def wait(self, deadline: Deadline | None = None) -> Past:
        return self


class Keeping:
    """One a run and rank. Every rank calls the same things in the same order."""

    def __init__(
        self,
        place: Place,
        strategy: Strategy,
        world: World,
        prepared: Prepared,
        trail: Trail,
        member: Member | None,
        emit: Sink,
    ) -> None:
        self.place, self.strategy, self.world, self.member, self.emit = place, strategy, world, member, emit
        self.prepared, self.trail, self.machine = prepared, trail, prepared.machine
        self.whole = Whole(prepared)
        self.description = member.description if member is not None else {}
        self.last: Checkpoint | None = None
        self.asked: list[Asked] = []
        self.saved: Source | None = None
        self.resumed_step: int | None = None
        self._objects: dict[str, Any] = {}
        self._came_from = ""
        self._looked = self._closed = False
        self._saver: Saver | None = None
        self.arrived: Callable[[], None] = lambda: None
        """Told when a worker that was started again is where the others are."""
        prepared.ready = self._ready
        prepared.stop_wanted = lambda: member is not None and member.stop_requested
        self.machine.following = lambda: trail.following
        self.machine.before_change = self._before_change
        self.machine.at_commit.append(self._committed)
        self.machine.at_bare_step = self.bare_step

    # -- saving --------------------------------------------------------------------------------------------------

    @property
    def target(self) -> str:
        """Where this run's checkpoints lie."""
        if self.strategy.checkpoint_dir:
            return f"{self.strategy.checkpoint_dir.rstrip('/')}/{self.place.run}"
        folder = self.place.run_dir or env.runs_dir() / self.place.run
        return str(folder / "checkpoints")

    @property
    def saver(self) -> Saver:
        rank, size = self.prepared.seat
        if self._saver is not None and (self._saver.rank, self._saver.size) != (rank, size):
            self._saver.finish(Deadline.after(CLOSE_S))
            self._saver = None
        if self._saver is None:
            meeting = alone()
            if self.member is not None:
                term = self.prepared.term or self.world.groups.term
                name = (
                    None if term is None else "saver"
                )  # all make it anew in this term, some for the first time
                meeting = MemberMeeting(self.member, rank, size, term=term, name=name)
            self._saver = Saver(self.target, rank, size, meeting, self.emit, keep=self.strategy.keep)
        return self._saver

    def _before_change(self) -> None:
        if self._saver is not None:
            self._saver.before_change()

    def checkpoint(self) -> Any:
        """run.checkpoint(): now, or at the end of the iteration."""
        self.prepared.saves += 1
        if self.trail.loop is None and self.machine.clean:
            return self._save(self.trail.path[-1].body[-1])
        step = self.machine.counters.global_step + (0 if self.machine.clean else 1)
        asked = Asked(self, step, f"{self.target}/step-{step:08d}")
        self.asked.append(asked)
        return asked

    def now(self) -> None:
        """Takes the checkpoint that was asked for in the body of a loop, as if the iteration ended here."""
        if self.machine.clean and self.trail.loop is not None:
            self._save(self.trail.loop)

    def past(self) -> Past:
        """For a script on its way back."""
        return Past(self.resumed_step or 0, self._came_from)

    def _committed(self, loop: Any) -> None:
        """The last step is final, and `loop` is about to go on (or is over)."""
        if (
            not self._closed
        ):  # a loop that was left open, cleared away while the interpreter ends: no thread can start
            self._final(loop.mark, may_leave=not loop.abandoned)

    def bare_step(self, whole: bool) -> None:
        """A step outside any loop over a loader is over; `whole`, when no other optimizer's gradient waits for its own."""
        mark = self.trail.stepped()
        if mark is not None and whole:
            self._final(mark, may_leave=True)

    def _final(self, mark: Mark, may_leave: bool) -> None:
        """Nothing of the last step can be lost any more, and `mark` is where it is come back to."""
        step = self.machine.counters.global_step
        if step and not self._looked:
            self._looked = True
            self.prepared.adopt_loose_schedulers()  # once, after the first step, where nobody waits for a checkpoint
            if self.strategy.checkpoint_every:
                self.saver.reserve(self.whole.holdings())
        every = self.strategy.checkpoint_every
        if self.stopping and may_leave:
            self.leave(mark)
        elif self.asked or (every and step and step % every == 0):
            self._save(mark)

    def _save(self, mark: Mark) -> Checkpoint:
        """Begins a checkpoint that is come back to at `mark`; one of the same step is enough."""
        step = self.machine.counters.global_step
        if self.last is None or self.last.step != step or self.last.state == "failed":
            since = time.monotonic()
            self.machine.drain(all_here=True)
            step = self.machine.counters.global_step
            if self.machine.committed:
                for loader in self.machine.loaders:
                    loader.mark()
            self.trail.leave_at(mark)
            objects, holdings = gather(self.prepared, self.whole, self.trail)
            self.last = self.saver.save(step, holdings, objects, self._about(), since)
        for asked in self.asked:
            asked.checkpoint = self.last
        self.asked = []
        return self.last

    def handed(self, mark: Mark) -> Tensor:
        """All of the state as it is, for a worker that was started again and comes to `mark`."""
        if self.machine.committed:
            for loader in self.machine.loaders:
                loader.mark()
        self.trail.leave_at(mark)
        objects = self.whole.objects(handed=True)
        objects["trail"] = self.trail.saved()
        step, holdings = self.machine.counters.global_step, self.whole.holdings(handed=True)
        return handed.packed(step, self.world.size, holdings, objects)

    def renew(self) -> None:
        """The workers are others since: a checkpoint that was under way has failed, and nothing that was asked for is known to all."""
        saver, self._saver, self.last, self.asked = self._saver, None, None, []
        self.prepared.saves = 0
        if saver is not None:
            saver.finish(Deadline.after(CLOSE_S))
            saver.close()

    def _about(self) -> dict[str, Any]:
        counters = self.machine.counters
        return {
            "run": self.place.run,
            "strategy": str(self.strategy),
            "workers": self.prepared.seat[1],
            "epoch": counters.epoch,
            "torch": torch.__version__,
        }

    def close(self) -> None:
        """Waits for what is still being written. Nothing is saved after this."""
        self._closed = True
        if self._saver is not None:
            self._saver.finish(Deadline.after(CLOSE_S))

    # -- stopping ------------------------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """Every rank knows at the same step that the run is to stop."""
        return self.machine.leaving or any(sync.stop_seen for sync in self.machine.syncs)

    def pause(self, kind: str) -> None:
        """Before a call of the script: leaves here if the run is to stop."""
        if not self.trail.following:
            self.machine.all_here()
        if self.stopping and self.machine.clean:
            self.leave(self.trail.at(kind))

    def leave(self, mark: Mark) -> None:
        """Saves, waits until it is complete, and ends this process with 75."""
        grace_s = float(self.description.get("grace_s", 30.0))
        for loader in self.machine.loaders:
            loader.leave()
        self._save(mark).wait(Deadline.after(grace_s))
        self.saver.finish(Deadline.after(grace_s))
        raise Preempted(PREEMPTED)

    # -- coming back ---------------------------------------------------------------------------------------------

    def begin(self, handed: Handed | None = None) -> None:
        """At the start: --resume finds its checkpoint; a worker that was started again has what another `handed` it."""
        if handed is not None:
            self._follow(handed)
            return
        asked = self.description.get("resume")
        if asked:
            self._open(asked["source"], must=asked["must"])

    def resume(self, source: str | Path | None) -> int | None:
        """run.resume(): the step at which it goes on, None when there is nothing to go on from."""
        if self.resumed_step is None:
            if self.trail.root.body:
                raise LoopError(
                    f"run.resume was called after the script had begun ({self.trail.root.body[0].kind})",
                    remedy="Call it before the first loop, right after prepare, or start with --resume.",
                )
            self._open(str(source) if source is not None else "", must=source is not None)
        elif source is not None and not self.place.incarnation:
            raise UsageError(
                f"this run was resumed already, at step {self.resumed_step}",
                remedy="Leave out --resume or the source of run.resume().",
            )
        return self.resumed_step

    def _open(self, source: str, must: bool) -> None:
        path, notes = sources.agree(
            self.member, self.world.rank, source, self.target, self.place.run, self.strategy.checkpoint_dir
        )
        for note in notes if self.world.rank == 0 else []:
            self.emit(Warned(rank=0, message=note))
        if not path:
            if must:
                raise CheckpointError(
                    f"there is no complete checkpoint in {source}",
                    remedy="Start without --resume, or name another run or checkpoint folder.",
                )
            return
        self._follow(load.open_saved(path))
        bare = self.trail.bare_steps()
        if bare and self.world.rank == 0:
            self.emit(
                Warned(
                    rank=0,
                    message=f"{bare} of the steps so far were outside any loop over a prepared loader: such a loop cannot be "
                    "entered in the middle, so they run again, without effect.\n"
                    "  Pass the loader through run.prepare, and the run goes on at its place at once.",
                )
            )
        for kind, count in self._prepared_so_far():
            for index in range(count):
                self._ready(kind, index)

    def _follow(self, saved: Source) -> None:
        """From now on the script finds its way back to where this was."""
        self.saved, self._came_from = saved, saved.path
        self._objects = self.saved.objects(self.world.rank)
        self.resumed_step = self.machine.counters.global_step = self._objects["step"]
        self.machine.step_before = self.resumed_step
        self.trail.follow(self._objects["trail"])

    def _prepared_so_far(self) -> list[tuple[str, int]]:
        prepared = self.prepared
        return [
            ("model", len(prepared.models)),
            ("optimizer", len(self.machine.optimizers)),
            ("scheduler", len(prepared.schedulers)),
            ("scaler", len(prepared.scalers)),
            ("tracked", len(prepared.tracked)),
        ]

    def _ready(self, kind: str, index: int) -> None:
        """An object was prepared: a resumed run gives it its state at once, and once more at the place."""
        if self.saved is None:
            return
        if kind == "optimizer" and not self.whole.same_parameters(self._objects, index):
            return  # the script may add groups on its way
        self.whole.restore_one(self.saved, self._objects, kind, index)

    def arrive(self) -> None:
        """The script is where the run was left: everything is as it was then."""
        saved, self.saved = self.saved, None
        assert saved is not None
        self.prepared.adopt_loose_schedulers()
        self.whole.restore(saved, self._objects)
        machine = self.machine
        machine.committed, machine.iteration_lost = True, False
        for prepared in machine.optimizers:
            prepared.optimizer._opt_called = True  # type: ignore[attr-defined]  # in its earlier life: no warning
        self.last = None
        if isinstance(saved, Handed):
            machine.counters.samples, machine.counters.all_samples = 0, self._objects["samples"]
            self.arrived()
        elif self.world.rank == 0:
            self.emit(
                Resumed(
                    rank=0,
                    step=saved.step,
                    path=str(saved.path),
                    saved_by=saved.world_size,
                    lines=[line for feed in self.prepared.feeds for line in feed.told()],
                )
            )
        self._objects = {}

    def check_arrived(self) -> None:
        """At the script's end: was the place ever reached?"""
        if self.trail.following:
            raise LoopError(
                f"the script ended before it came to the place at which the run was left: {self.trail.place()} "
                f"(step {self.resumed_step})",
                remedy="A resumed run needs the same script and arguments.",
            )
