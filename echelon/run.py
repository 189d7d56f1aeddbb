"""The public face: what a script holds after `echelon.init()`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon import away, build, facts
from echelon.apart import TOGETHER_S, all_here, steady, turn
from echelon.clock import Deadline
from echelon.comm.alone import AloneGroup
from echelon.comm.group import Lost, Outcome
from echelon.control.member import Member
from echelon.data import randomness
from echelon.data.loader import Part
from echelon.env import Place
from echelon.errors import UsageError
from echelon.events import Beat, Facts, Sink, Warned
from echelon.keeping import Keeping
from echelon.loop import Yielding
from echelon.parallel import arriving, backward, clip, norm
from echelon.parallel.average import Average
from echelon.parallel.exchange import Exchange, ReduceOp
from echelon.parallel.word import Word
from echelon.prepare import evaluate as evaluating
from echelon.prepare import save as saving
from echelon.prepare.firststep import FirstStep
from echelon.prepare.keep import Randomness
from echelon.prepare.loader import Loop, feed_of
from echelon.prepare.log import Log
from echelon.prepare.mean import Normaliser
from echelon.prepare.phase import Phase
from echelon.prepare.trail import Trail, epochs_to_do
from echelon.prepare.values import Values
from echelon.prepared import Prepared
from echelon.rejoin import Rejoin
from echelon.step import Machine
from echelon.strategy import Strategy
from echelon.tally import Tally


class Run:
    """One run, seen from one worker. Made by `echelon.init`; every rank calls the same things in the same order."""

    def __init__(
        self,
        place: Place,
        strategy: Strategy,
        member: Member | None,
        emit: Sink,
        world: build.World | None = None,
    ) -> None:
        self.place, self.strategy, self.member, self.emit = place, strategy, member, emit
        self.name, self.run_dir = place.run, place.run_dir
        randomness.seed_everything(strategy.seed)
        self.world = world or build.world(place, strategy, member)
        self.machine = Machine(strategy, self.rank, self.world.part[1], emit)
        self.machine.leads, self.machine.split.group = self.world.leads, self.world.model
        if self.world.gradients is not self.world.everyone:
            self.machine.word = Word(self.world.everyone, self.device)
        self.machine.warn = self._warn
        apart = build.apart(strategy, self.world)
        side = apart.group if apart is not None else self.world.side
        self.exchange = Exchange(side, self._side_lost)
        self.values = Values(self.machine, self.exchange)
        self.norms = norm.NormSync(self.world.side, lambda: self.machine.share, self._side_lost)
        self.log_book = Log(self.machine, emit, own_beat=member is None)
        self.trail = Trail(lambda: self.keeping.arrive())
        self.prepared = Prepared(
            strategy,
            self.world,
            self.machine,
            self.norms,
            self.trail,
            self._warn,
            apart,
            lambda x: float(self.values.reduce(x, "mean", self.device)),
            self.name,
        )
        self.tally = Tally(self.prepared)
        self.keeping = Keeping(place, strategy, self.world, self.prepared, self.trail, member, emit)
        self.prepared.say = lambda lines: emit(Facts(rank=0, lines=lines)) if self.is_main else None
        self._num_phases = 0
        own = Exchange(AloneGroup(self.device), self._side_lost) if strategy.alone else self.exchange
        self.normaliser = Normaliser(self.machine, own)
        self.machine.on_lost += [self.normaliser.forget, self.log_book.forget]
        self.first_step = FirstStep(self.machine, own, self._warn)
        self.first_step.draws = lambda: facts.tell_draws(self)
        self.machine.keepers.append(Randomness(cuda=self.device.type == "cuda"))
        self.machine.global_loss = self.values.global_loss  # type: ignore[method-assign]
        self.machine.at_first_begin.append(self._first_batch)
        if strategy.alone:
            self.machine.all_here = lambda: all_here(self)
        if apart is not None:
            barrier = apart.group.barrier
            self.machine.all_saved = lambda: self._side_lost(barrier().wait(Deadline.after(TOGETHER_S)))
        if self.prepared.rounds is not None:
            self.machine.loop_over, self.machine.at_bare_step = self._loop_over, self._bare_step
        if strategy.strict:
            self.machine.before_apply.append(lambda optimizer: facts.refuse_unused(self, optimizer))
        self.machine.after_apply.append(self._after_apply)
        backward.watch_checkpoints()
        if member is not None:
            member.report = self.beat
            member.at_end = self._at_end
        self.rejoin = Rejoin(self.keeping, self.first_step)
        self.keeping.begin(self.rejoin.come_back() if place.incarnation else None)

    # -- where am I ----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def world_size(self) -> int:
        return self.world.size

    @property
    def local_rank(self) -> int:
        return self.world.local_rank

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def models(self) -> list[nn.Module]:
        return self.prepared.models

    @property
    def averages(self) -> dict[int, Average]:
        """Moving averages by the model's id."""
        return self.prepared.averages

    @property
    def is_main(self) -> bool:
        """Is this the worker that prints and writes for all? Rank 0; where the others go on without it, the lowest that was there when they
        last met."""
        return self.prepared.seat[0] == 0

    @property
    def global_step(self) -> int:
        """Optimizer steps committed so far; several optimizers in one iteration are one step, lost steps are none."""
        return self.machine.counters.global_step

    def every(self, n: int) -> bool:
        """True once each n committed steps, in the iteration that committed; replays and mid-group never see it."""
        return bool(self.machine.in_iteration) and self.global_step % n == 0

    def print(self, *values: Any, sep: str = " ") -> None:
        """Prints on rank 0 only; a resumed script prints nothing on its way back."""
        if self.is_main and not self.trail.following:
            print(*values, sep=sep, flush=True)

    # -- prepare -------------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any, **loader_options: Any) -> Any:
        """Readies models, optimizers, schedulers, GradScalers, DataLoaders (or datasets); same order back.

        Models, optimizers and schedulers come back as the same objects. May be called again with more. A resumed run
        restores each of them here.
        """
        return self.prepared.prepare(objects, loader_options)

    def track(self, obj: Any) -> Any:
        """`obj` (anything with state_dict and load_state_dict) is saved with checkpoints and put back when a step is lost."""
        return self.prepared.track(obj)

    # -- the loop ------------------------------------------------------------------------------------------------

    def epochs(self, n: int) -> Iterator[int]:
        """The epochs still to do: a resumed run enters at the one in which it was left."""
        yield from epochs_to_do(n, self.trail)

    def step(
        self,
        loss_fn: Callable[[Any, Any], Tensor],
        batch: Any,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        clip_norm: float | None = None,
    ) -> Tensor:
        """One whole step: forward, backward, clip, optimizer step, zero_grad. Returns the loss over the global batch."""
        model = model or self.prepared.only(self.prepared.models, "model")
        optimizers = [o.optimizer for o in self.machine.optimizers]
        optimizer = optimizer or self.prepared.only(optimizers, "optimizer")
        try:
            inputs, target = batch
        except (TypeError, ValueError):
            raise UsageError(
                "run.step takes a batch of two: (inputs, target)", remedy="Give batch=(inputs, target)."
            ) from None
        args = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
        kwargs = inputs if isinstance(inputs, dict) else {}
        stepper = self.prepared.stepper(model)
        if stepper is not None:
            shown = self.values.global_loss(stepper.step(loss_fn, args, kwargs, target))
            shown = shown.to(stepper.loss_dtype)
        else:
            output = model(*args, **kwargs)
            loss = loss_fn(output, target)
            self.first_step.check_halves(loss_fn, output, target)
            del output  # what of it backward needs is kept by the loss
            shown = self.values.global_loss(loss.detach())
            loss.backward()
        if clip_norm is not None:
            self.clip_grad_norm(model, clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return shown  # type: ignore[no-any-return]

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clips the global gradient's norm; returns the norm before. In mid-group there is nothing to clip."""
        self.machine.finish(model.parameters())
        return away.clip_now(self.machine, model.parameters(), max_norm)

    def clip_grad_value(self, model: nn.Module, limit: float) -> None:
        self.machine.finish(model.parameters())
        clip.clip_value(model.parameters(), limit)  # raises where gradients are on servers

    def mean(self, total: Tensor, count: Any) -> Tensor:
        """total / count over the whole world and the whole accumulation group: for losses over unequal counts.

        `total` is this part's sum (of token losses, say), `count` its number of terms. In an accumulation group all of
        the loss must go through mean().
        """
        return self.normaliser.mean(total, count)

    def log(self, **values: Any) -> None:
        """Numbers or tensors, averaged over workers by samples and shown live; no collective."""
        if not self.trail.following:
            self.log_book.add(values)

    # -- values across ranks -------------------------------------------------------------------------------------

    def reduce(self, x: Any, op: ReduceOp = "mean") -> Any:
        """x over all workers. mean is weighted by samples; a tensor gives a tensor, a number a number."""
        if op not in ("mean", "sum", "min", "max"):
            raise UsageError(f"reduce() knows mean, sum, min and max, not {op!r}")
        self.keeping.pause("reduce")
        return self.trail.call(
            "reduce", lambda: self.rejoin.once(lambda: self.values.reduce(x, op, self.device))
        )

    def gather(self, x: Tensor) -> Tensor:
        """The rows (dim 0) of all workers in global order; differentiable: the answer for in-batch negatives."""
        self.first_step.end()  # a loss over gathered rows is global already: nothing to compare
        gathered = self.trail.call(
            "gather",
            lambda: self.rejoin.once(lambda: self.exchange.gather(x, self.machine.share)),
            keep=self.machine.current is None,  # in a loop its graph is of this life
        )
        assert isinstance(gathered, Tensor)
        return gathered

    def evaluate(
        self, model: nn.Module, loader: Any, fn: Callable[[nn.Module, Any], dict[str, tuple[Any, Any]]]
    ) -> dict[str, float]:
        """fn(model, batch) -> {name: (sum, count)}; every sample of the loader counts once, whatever the world.

        The model is in eval mode and no gradient is kept; with ema its averaged weights are evaluated.
        """
        self.keeping.pause("evaluate")
        result: dict[str, float] = self.trail.call(
            "evaluate",
            lambda: self.rejoin.call(lambda: steady(self, lambda: self._evaluate(model, loader, fn))),
        )
        return dict(result)

    def _evaluate(self, model: nn.Module, loader: Any, fn: evaluating.Judge) -> dict[str, float]:
        feed = feed_of(loader) or self.prepared.feed(loader, trains=False)
        stop = self.prepared.stop_wanted if self.machine.clean else lambda: False
        average = self.averages.get(id(model))
        together = self.prepared.sharding.splits or self.prepared.tables.sides is not None
        fn, exchange = self.prepared.tables.judged(model, fn, self.exchange)
        ratios = exchange.ratios(evaluating.totals(model, feed, fn, average, stop, together))
        if ratios.pop(evaluating.STOP, 0.0):
            self.keeping.leave(self.trail.path[-1].body[-1])
        return ratios

    def phase(self, name: str) -> Phase:
        """with run.phase("tokenize") as phase: … runs on rank 0 (phase.progress(0.5) is shown); the others wait."""
        self._num_phases += 1
        self.keeping.pause(f"phase {name}")
        done = self.trail.moment(f"phase {name}") is None and self.trail.has_looped
        number, rank = self._num_phases, self.rank
        return Phase(
            name, number, rank, self.member, self.emit, does=self.is_main, over=done, heir=turn(self)
        )

    @contextlib.contextmanager
    def build(self) -> Iterator[None]:
        """Around the construction of a model that one worker cannot hold: recorded here, made in prepare(), where each rank keeps
        its part. Random numbers are those of plain construction at this place of the script, inside and afterwards."""
        with build.construction(self.strategy):
            yield

    def save(self, path: str | Path, model: nn.Module | None = None) -> Path:
        """A plain state dict under the user's own names (with ema: the averaged weights). All return when it is there."""
        model = model or self.prepared.only(self.prepared.models, "model")
        target = saving.target(path)
        self.keeping.pause("save")
        mark = self.trail.moment("save")
        if mark is None:
            return target
        self.prepared.make_whole()
        save = partial(saving.save, self.prepared, model, target, self.exchange)
        self.rejoin.call(lambda: steady(self, save), mark)
        mark.done = True
        return target

    def checkpoint(self) -> Any:
        """Saves everything: weights, optimizers, schedulers, random states, the place in the data and in the script.

        Returns at once with a handle (step, path, state, wait()); the copy runs beside the next forward and backward, the
        write in the background. Asked for in mid-step, it is taken once the step is committed.
        """
        self.keeping.pause("checkpoint")
        if self.trail.moment("checkpoint") is None:
            return self.keeping.past()
        return self.keeping.checkpoint()

    def resume(self, source: str | Path | None = None) -> int | None:
        """Goes on from a checkpoint, a folder or URL of them, or a run (default: this run's own last complete one).

        Call it before the first loop. Gives the step, or None when there is nothing to go on from; then the script starts
        from its beginning. `echelon run --resume` does the same without a call.
        """
        return self.keeping.resume(source)

    # -- what the machine and the launcher ask -------------------------------------------------------------------

    def beat(self) -> Beat:
        """This rank's counters; called from the beat thread."""
        self.log_book.flush()
        return facts.beat(self.machine, self.rank, self.tally)

    def _side_lost(self, outcome: Outcome) -> None:
        if isinstance(outcome, Lost):
            self.machine.side_losses.append(outcome)

    def _after_apply(self, optimizer: Any) -> None:
        params = {id(p) for p in optimizer.params()}
        for model in self.models:
            average = self.averages.get(id(model))
            if average is not None and any(id(p) in params for p in average.live):
                average.update()

    def _loop_over(self, loop: Yielding) -> None:
        """Under local all copies are the same after a loop that is in no other; who left it in its middle is waited for at the next such
        place: maybe an error did, and it must be heard of now."""
        self.machine.drain()
        rounds = self.prepared.rounds
        assert rounds is not None
        if any(other is not loop for other in self.machine.open_loops):
            return
        if self.trail.following or loop.abandoned:
            rounds.pass_by()
        else:
            rounds.gather()

    def _bare_step(self, whole: bool) -> None:
        if whole and self.prepared.rounds is not None:
            self.prepared.rounds.step_over()
        self.keeping.bare_step(whole)

    def _at_end(self) -> None:
        """The script came to its end."""
        self.keeping.check_arrived()
        if self.prepared.rounds is not None:
            self.prepared.rounds.gather()

    def _first_batch(self, first: Part) -> None:
        """Until here all ranks drew alike (weights, splits of the data); from now on each draws its own dropout."""
        part = self.world.part[0]
        if part and self.keeping.resumed_step is None:
            torch.manual_seed(randomness.mix(self.strategy.seed, part, "dropout"))
        if self.is_main and isinstance(loop := self.machine.current, Loop):
            self.emit(Facts(rank=0, lines=facts.lines(self, loop.feed)))

    def _warn(self, message: str) -> None:
        self.emit(Warned(rank=self.rank, message=message))

    def close(self) -> None:
        """Ends the run for this process; called at exit."""
        self.first_step.end()
        self.prepared.graphs.end()
        self.log_book.flush()
        self.keeping.close()
        arriving.settle()  # whoever reads parameters from now on finds them as the last step left them
        self.world.close()
