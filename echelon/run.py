"""The public face: what a script holds after `echelon.init()`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from echelon import build, facts
from echelon.comm.group import Lost, Outcome
from echelon.control.member import Member
from echelon.data import randomness
from echelon.data.loader import Part
from echelon.elastic import policy
from echelon.env import Place
from echelon.errors import UsageError
from echelon.events import Beat, Facts, Sink, Warned
from echelon.parallel import backward, clip, norm
from echelon.parallel.average import Average
from echelon.parallel.exchange import Exchange, ReduceOp
from echelon.prepare import evaluate as evaluating
from echelon.prepare import model as models
from echelon.prepare import save as saving
from echelon.prepare.firststep import FirstStep
from echelon.prepare.keep import Buffers, Hyper, Randomness, Tensors, Tracked
from echelon.prepare.loader import Feed, Loop, feed_of, prepare_loader
from echelon.prepare.log import Log
from echelon.prepare.mean import Normaliser
from echelon.prepare.optimizer import PreparedOptimizer, prepared_optimizer, warmup_factor
from echelon.prepare.phase import Phase
from echelon.prepare.scheduler import prepare_scaler, prepare_scheduler
from echelon.prepare.values import Values
from echelon.step import Machine
from echelon.strategy import Strategy


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
        self.machine = Machine(strategy, self.rank, self.world_size, emit)
        self.machine.after_loss = self._after_loss
        self.machine.warn = self._warn
        self.machine.at_snapshot.append(self._adopt_loose_parameters)
        self.machine.before_meeting = lambda optimizer: self._adopt_loose_parameters()
        self.exchange = Exchange(self.world.side, self._side_lost)
        self.values = Values(self.machine, self.exchange)
        self.norms = norm.NormSync(self.world.side, lambda: self.machine.share, self._side_lost)
        self.log_book = Log(self.machine, emit, own_beat=member is None)
        self.models: list[nn.Module] = []
        self.feeds: list[Feed] = []
        self.averages: dict[int, Average] = {}
        self._owned: set[int] = set()
        self._num_phases = 0
        self._told_uneven = False
        self.strict_watch = models.Ran() if strategy.strict else None
        self.normaliser = Normaliser(self.machine, self.exchange)
        self.machine.on_lost += [self.normaliser.forget, self.log_book.forget]
        self.first_step = FirstStep(self.machine, self.exchange, self._warn)
        self.first_step.draws = lambda: facts.tell_draws(self)
        self.machine.keepers.append(Randomness(cuda=self.device.type == "cuda"))
        self.machine.global_loss = self.values.global_loss  # type: ignore[method-assign]
        self.machine.at_first_begin.append(self._first_batch)
        if self.strict_watch is not None:
            self.machine.before_apply.append(lambda optimizer: facts.refuse_unused(self, optimizer))
        self.machine.after_apply.append(self._after_apply)
        backward.watch_checkpoints()
        if member is not None:
            member.report = self.beat

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
    def is_main(self) -> bool:
        return self.world.rank == 0

    @property
    def global_step(self) -> int:
        """Optimizer steps committed so far; several optimizers in one iteration are one step, lost steps are none."""
        return self.machine.counters.global_step

    def every(self, n: int) -> bool:
        """True once each n committed steps, in the iteration that committed; replays and mid-group never see it."""
        return bool(self.machine.in_iteration) and self.global_step % n == 0

    def print(self, *values: Any, sep: str = " ") -> None:
        """Prints on rank 0 only."""
        if self.is_main:
            print(*values, sep=sep, flush=True)

    # -- prepare -------------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any, **loader_options: Any) -> Any:
        """Readies models, optimizers, schedulers, GradScalers, DataLoaders (or datasets); same order back.

        Models, optimizers and schedulers come back as the same objects. May be called again with more.
        """
        prepared: list[Any] = [None] * len(objects)
        for kind in (
            nn.Module,
            torch.optim.Optimizer,
            object,
        ):  # models first: optimizers look for their parameters
            for i, obj in enumerate(objects):
                if prepared[i] is None and isinstance(obj, kind):
                    prepared[i] = self._prepare_one(obj, loader_options)
        self._adopt_loose_parameters()
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _prepare_one(self, obj: Any, loader_options: dict[str, Any]) -> Any:
        if isinstance(obj, nn.Module):
            return self._prepare_model(obj)
        if isinstance(obj, torch.optim.Optimizer):
            return self._prepare_optimizer(obj)
        if isinstance(obj, DataLoader):
            return self._prepare_loader(obj)
        if isinstance(
            obj, (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        ):
            prepare_scheduler(obj, self.machine, lambda value: float(self.reduce(value, "mean")))
            return obj
        if isinstance(obj, torch.amp.GradScaler):
            prepare_scaler(obj, self.machine)
            return obj
        if isinstance(obj, Dataset) or (hasattr(obj, "__getitem__") and hasattr(obj, "__len__")):
            return self._prepare_loader(DataLoader(obj, **loader_options))
        raise UsageError(
            f"prepare() does not know what to do with a {type(obj).__name__}",
            remedy="It takes models, optimizers, schedulers, GradScalers, DataLoaders and datasets. "
            "Objects with state_dict/load_state_dict go to run.track().",
        )

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        if any(model is known for known in self.models):
            return model
        model.to(self.device)
        models.equalise([*model.parameters(), *model.buffers()], self.world.gradients)
        if self.strategy.sync_batchnorm:
            norm.synchronise(model, self.norms)
        if self.strategy.precision != "fp32":
            models.compute_in(
                model, {"bf16": torch.bfloat16, "fp16": torch.float16}[self.strategy.precision], self.device
            )
        names, sparse = models.names(model), models.sparse_params(model)
        params = {id(p): p for p in model.parameters() if p.is_floating_point() or p.is_complex()}
        fresh = [(names.get(i, "?"), p, i in sparse) for i, p in params.items() if i not in self._owned]
        if self.strict_watch is not None:
            self.strict_watch.watch(model)
        watch = models.Watch(model, self.machine)
        self._add_sync(fresh).on_met = watch.backward_over
        models.watch_zero_grad(model, self.machine)
        self.machine.keepers.append(Buffers(model))
        if self.strategy.ema:
            average = self.averages[id(model)] = Average(model, self.strategy.ema)
            self.machine.keepers.append(Tensors(average.shadow))
        self.models.append(model)
        return model

    def _add_sync(self, params: list[tuple[str, nn.Parameter, bool]]) -> Any:
        group = self.world.groups.make() if self.machine.syncs else self.world.gradients
        sync = build.grad_sync(self.strategy, params, group)
        sync.on_uneven = self._uneven
        self._owned |= {id(p) for _, p, _ in params}
        self.machine.syncs.append(sync)
        self._link()
        return sync

    def _uneven(self) -> None:
        if not self._told_uneven:
            self._told_uneven = True
            self._warn(facts.UNEVEN)

    def _link(self) -> None:
        """Every optimizer knows the meetings of the parameters that it steps."""
        for optimizer in self.machine.optimizers:
            params = {id(p) for p in optimizer.params()}
            optimizer.syncs = [s for s in self.machine.syncs if s.holds(params)]

    def _prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if prepared_optimizer(optimizer) is None:
            prepared = PreparedOptimizer(optimizer, self.machine)
            self.machine.keepers.append(Hyper(optimizer))
            if self.strategy.batch == "per-worker" and self.strategy.scale_lr:
                prepared.lr_factor = warmup_factor(self.world_size, self.strategy.warmup_steps)
            self._link()
        return optimizer

    def _adopt_loose_parameters(self) -> None:
        """Parameters that an optimizer steps and no prepared model holds still have to meet."""
        loose = {id(p): p for o in self.machine.optimizers for p in o.params() if id(p) not in self._owned}
        if loose:
            params = [p for p in loose.values() if isinstance(p, nn.Parameter) or p.is_leaf]
            models.equalise(params, self.world.gradients)
            self._add_sync([(f"parameter {i} of the optimizer", p, False) for i, p in enumerate(params)])  # type: ignore[misc]

    def _prepare_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        if feed_of(loader) is not None:
            return loader
        feed = self._feed(loader, trains=True)
        self.feeds.append(feed)
        return prepare_loader(loader, feed)

    def _feed(self, loader: DataLoader[Any], trains: bool) -> Feed:
        cut = build.cut(self.strategy, self.world)
        return Feed(loader, cut, self.strategy.seed, self.world.side, self.device, self.machine, trains)

    def track(self, obj: Any) -> Any:
        """`obj` (anything with state_dict and load_state_dict) is put back when a step is lost."""
        if not hasattr(obj, "state_dict") or not hasattr(obj, "load_state_dict"):
            raise UsageError(
                f"track() needs state_dict and load_state_dict, and {type(obj).__name__} lacks one"
            )
        self.machine.keepers.append(Tracked(obj))
        return obj

    # -- the loop ------------------------------------------------------------------------------------------------

    def epochs(self, n: int) -> Iterator[int]:
        """The epochs still to do."""
        yield from range(n)

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
        model = model or self._only(self.models, "model")
        optimizer = optimizer or self._only([o.optimizer for o in self.machine.optimizers], "optimizer")
        try:
            inputs, target = batch
        except (TypeError, ValueError):
            raise UsageError(
                "run.step takes a batch of two: (inputs, target)", remedy="Give batch=(inputs, target)."
            ) from None
        output = (
            model(*inputs)
            if isinstance(inputs, tuple)
            else model(**inputs)
            if isinstance(inputs, dict)
            else model(inputs)
        )
        loss = loss_fn(output, target)
        self.first_step.check_halves(loss_fn, output, target)
        shown = self.values.global_loss(loss.detach())
        loss.backward()
        if clip_norm is not None:
            self.clip_grad_norm(model, clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return shown  # type: ignore[no-any-return]

    def _only(self, found: list[Any], what: str) -> Any:
        if len(found) == 1:
            return found[0]
        raise UsageError(
            f"run.step needs to know which {what}: {len(found)} were prepared",
            remedy=f"Prepare one, or give {what}=…",
        )

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clips the global gradient's norm; returns the norm before. In mid-group there is nothing to clip."""
        self.machine.finish(model.parameters())
        return clip.clip_norm(model.parameters(), max_norm)

    def clip_grad_value(self, model: nn.Module, limit: float) -> None:
        self.machine.finish(model.parameters())
        clip.clip_value(model.parameters(), limit)

    def mean(self, total: Tensor, count: Any) -> Tensor:
        """total / count over the whole world and the whole accumulation group: for losses over unequal counts.

        `total` is this part's sum (of token losses, say), `count` its number of terms. In an accumulation group all of
        the loss must go through mean().
        """
        return self.normaliser.mean(total, count)

    def log(self, **values: Any) -> None:
        """Numbers or tensors, averaged over workers by samples and shown live; no collective."""
        self.log_book.add(values)

    # -- values across ranks -------------------------------------------------------------------------------------

    def reduce(self, x: Any, op: ReduceOp = "mean") -> Any:
        """x over all workers. mean is weighted by samples; a tensor gives a tensor, a number a number."""
        if op not in ("mean", "sum", "min", "max"):
            raise UsageError(f"reduce() knows mean, sum, min and max, not {op!r}")
        return self.values.reduce(x, op, self.device)

    def gather(self, x: Tensor) -> Tensor:
        """The rows (dim 0) of all workers in global order; differentiable: the answer for in-batch negatives."""
        self.first_step.end()  # a loss over gathered rows is global already: nothing to compare
        return self.exchange.gather(x, self.machine.share)

    def evaluate(
        self, model: nn.Module, loader: Any, fn: Callable[[nn.Module, Any], dict[str, tuple[Any, Any]]]
    ) -> dict[str, float]:
        """fn(model, batch) -> {name: (sum, count)}; every sample of the loader counts once, whatever the world.

        The model is in eval mode and no gradient is kept; with ema its averaged weights are evaluated.
        """
        feed = feed_of(loader) or self._feed(loader, trains=False)
        return self.exchange.ratios(evaluating.totals(model, feed, fn, self.averages.get(id(model))))

    def phase(self, name: str) -> Phase:
        """with run.phase("tokenize") as phase: … runs on rank 0 (phase.progress(0.5) is shown); the others wait."""
        self._num_phases += 1
        return Phase(name, self._num_phases, self.rank, self.member, self.emit)

    @contextlib.contextmanager
    def build(self) -> Iterator[None]:
        """Around the construction of a model. Under all-reduce every rank holds all of it, made from the run's seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.strategy.seed)
            yield

    def save(self, path: str | Path, model: nn.Module | None = None) -> Path:
        """A plain state dict under the user's own names (with ema: the averaged weights). All return when it is there."""
        model = model or self._only(self.models, "model")
        average = self.averages.get(id(model))
        target = saving.target(path)
        with average.swapped() if average else contextlib.nullcontext():
            saving.write_once(models.state(model), target, self.exchange)
        return target

    # -- what the machine and the launcher ask -------------------------------------------------------------------

    def beat(self) -> Beat:
        """This rank's counters; called from the beat thread."""
        self.log_book.flush()
        return facts.beat(self.machine, self.rank, max((f.epochs for f in self.feeds), default=0))

    def _after_loss(self, lost: Lost, step: int) -> None:
        seats = self.member.roster() if self.member is not None and lost.peers else {}
        decision = policy.after_loss(lost.peers, lost.reason, seats, self.rank, step)
        if isinstance(decision, policy.Stop):
            raise decision.error

    def _side_lost(self, outcome: Outcome) -> None:
        if isinstance(outcome, Lost):
            self.machine.side_losses.append(outcome)

    def _after_apply(self, optimizer: Any) -> None:
        params = {id(p) for p in optimizer.params()}
        for model in self.models:
            average = self.averages.get(id(model))
            if average is not None and any(id(p) in params for p in average.live):
                average.update()

    def _first_batch(self, part: Part) -> None:
        """Until here all ranks drew alike (weights, splits of the data); from now on each draws its own dropout."""
        if self.rank:
            torch.manual_seed(randomness.mix(self.strategy.seed, self.rank, "dropout"))
        if self.is_main and isinstance(loop := self.machine.current, Loop):
            self.emit(Facts(rank=0, lines=facts.lines(self, loop.feed)))

    def _warn(self, message: str) -> None:
        self.emit(Warned(rank=self.rank, message=message))

    def close(self) -> None:
        """Ends the run for this process; called at exit."""
        self.first_step.end()
        self.log_book.flush()
        self.world.groups.close()
