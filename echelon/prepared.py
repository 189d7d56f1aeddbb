"""What a script handed to prepare() and track(), by kind and in order, and how each is made ready."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from echelon import build, facts
from echelon.apart import Apart
from echelon.errors import StrategyError, UsageError
from echelon.loop import Stepping
from echelon.mesh.layout import Stateful
from echelon.parallel import norm, rounds
from echelon.parallel.average import Average
from echelon.parallel.coded import CodedWire
from echelon.parallel.finite import Watch
from echelon.parallel.first import FirstSync
from echelon.parallel.stale import FreeSync
from echelon.prepare import model as models
from echelon.prepare.keep import Buffers, Hyper, Tensors, Tracked
from echelon.prepare.loader import Feed, feed_of, prepare_loader
from echelon.prepare.optimizer import PreparedOptimizer, prepared_optimizer, warmup_factor
from echelon.prepare.scheduler import prepare_scaler, prepare_scheduler
from echelon.prepare.trail import Trail
from echelon.step import Machine
from echelon.strategy import Strategy

SCHEDULERS = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


class Prepared:
    """One a run. `ready` is told of every object once it is prepared: a resumed run restores it there."""

    def __init__(
        self,
        strategy: Strategy,
        world: build.World,
        machine: Machine,
        norms: norm.NormSync,
        trail: Trail,
        warn: Callable[[str], None],
        apart: Apart | None,
        mean: Callable[[float], float],
    ) -> None:
        self.strategy, self.world, self.machine, self.norms = strategy, world, machine, norms
        self.apart = apart
        """Where workers are not at one place; None where they are."""
        self.trail, self.warn, self.mean = trail, warn, mean
        self.models: list[nn.Module] = []
        self.feeds: list[Feed] = []
        self.schedulers: list[Any] = []
        self.scalers: list[Any] = []
        self.tracked: list[Stateful] = []
        self.averages: dict[int, Average] = {}
        self.ready: Callable[[str, int], None] = lambda kind, index: None
        self.stop_wanted: Callable[[], bool] = lambda: False
        self.saves = 0
        """How often the script asked for a checkpoint."""
        self.rounds = build.rounds(strategy, world, machine)
        """With update=local: where copies of the models meet."""
        self.strict_watch = models.Ran() if strategy.strict else None
        self._owned: set[int] = set()
        self._told_uneven = False
        machine.at_snapshot.append(self.adopt_loose_parameters)
        machine.before_meeting = lambda optimizer: self.adopt_loose_parameters()
        machine.after_apply.append(self._applied)

    def prepare(self, objects: tuple[Any, ...], loader_options: dict[str, Any]) -> Any:
        prepared: list[Any] = [None] * len(objects)
        for kind in (
            nn.Module,
            torch.optim.Optimizer,
            object,
        ):  # models first: optimizers look for their parameters
            for i, obj in enumerate(objects):
                if prepared[i] is None and isinstance(obj, kind):
                    prepared[i] = self._one(obj, loader_options)
        self.adopt_loose_parameters()
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _one(self, obj: Any, loader_options: dict[str, Any]) -> Any:
        if isinstance(obj, nn.Module):
            return self._model(obj)
        if isinstance(obj, torch.optim.Optimizer):
            return self._optimizer(obj)
        if isinstance(obj, DataLoader):
            return self._loader(obj)
        if isinstance(obj, SCHEDULERS):
            return self._scheduler(obj)
        if isinstance(obj, torch.amp.GradScaler):
            return self._scaler(obj)
        if isinstance(obj, Dataset) or (hasattr(obj, "__getitem__") and hasattr(obj, "__len__")):
            return self._loader(DataLoader(obj, **loader_options))
        raise UsageError(
            f"prepare() does not know what to do with a {type(obj).__name__}",
            remedy="It takes models, optimizers, schedulers, GradScalers, DataLoaders and datasets. "
            "Objects with state_dict/load_state_dict go to run.track().",
        )

    def _model(self, model: nn.Module) -> nn.Module:
        if any(model is known for known in self.models):
            return model
        model.to(self.world.device)
        models.equalise([*model.parameters(), *model.buffers()], self.world.gradients)
        if self.strategy.sync_batchnorm and not self.strategy.alone:
            norm.synchronise(model, self.norms)
        if self.strategy.precision != "fp32":
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.strategy.precision]
            models.compute_in(model, dtype, self.world.device)
        names, sparse = models.names(model), models.sparse_params(model)
        params = {id(p): p for p in model.parameters() if p.is_floating_point() or p.is_complex()}
        fresh = [(names.get(i, "?"), p, i in sparse) for i, p in params.items() if i not in self._owned]
        if self.strict_watch is not None:
            self.strict_watch.watch(model)
        watch = models.Watch(model, self.machine)
        sync = self._add_sync(fresh)
        sync.on_met = watch.backward_over
        if self.rounds is not None:
            sync.moments = lambda: rounds.moments_of(model)
        models.watch_zero_grad(model, self.machine)
        self.machine.keepers.append(Buffers(model))
        if self.strategy.ema:
            average = self.averages[id(model)] = Average(model, self.strategy.ema)
            self.machine.keepers.append(Tensors(average.shadow))
        self.models.append(model)
        self.ready("model", len(self.models) - 1)
        return model

    def _add_sync(self, params: list[tuple[str, nn.Parameter, bool]]) -> Any:
        group = self.world.groups.make() if self.machine.syncs else self.world.gradients
        sync = build.grad_sync(self.strategy, params, group, self.world, self.rounds)
        sync.on_uneven = self._uneven
        sync.stop_wanted = lambda: self.stop_wanted()
        sync.saves = lambda: self.saves
        if isinstance(sync, FreeSync):
            sync.pieces = self._held
        if isinstance(sync, FirstSync):
            self._one_model()
            sync.count = self._samples
            sync.on_dropped = self._dropped
        self._owned |= {id(p) for _, p, _ in params}
        self.machine.syncs.append(sync)
        if self.strategy.nonfinite == "refuse" and sync.applies_here and not group.local:
            self.machine.watches[id(sync)] = Watch(sync.wire)
        if isinstance(sync.wire, CodedWire):
            self.machine.keepers.append(sync.wire)
        self._link()
        return sync

    def _one_model(self) -> None:
        if self.machine.syncs:
            raise StrategyError(
                "with backup or aggregate one model is trained: the samples of a late part are dealt again for it",
                remedy="Put both into one module with one optimizer, or use update=sync or async.",
            )

    def _samples(self) -> int:
        return sum(loader.samples() for loader in self.machine.loaders) or 1

    def _dropped(self) -> None:
        for loader in self.machine.loaders:
            loader.drop()

    def _held(self) -> list[list[int]]:
        return [held for loader in self.machine.loaders for held in loader.held()]

    def _applied(self, optimizer: Stepping) -> None:
        for sync in optimizer.syncs if self.strategy.compress != "none" else ():
            sync.applied(optimizer.params())

    def _uneven(self) -> None:
        if not self._told_uneven:
            self._told_uneven = True
            self.warn(facts.UNEVEN)

    def _link(self) -> None:
        """Every optimizer knows the meetings of the parameters that it steps."""
        for optimizer in self.machine.optimizers:
            params = {id(p) for p in optimizer.params()}
            optimizer.syncs = [s for s in self.machine.syncs if s.holds(params)]

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if prepared_optimizer(optimizer) is None:
            prepared = PreparedOptimizer(optimizer, self.machine)
            self.machine.keepers.append(Hyper(optimizer))
            if self.strategy.batch == "per-worker" and self.strategy.scale_lr:
                prepared.lr_factor = warmup_factor(self.world.size, self.strategy.warmup_steps)
            self._link()
            self.ready("optimizer", prepared.index)
        return optimizer

    def adopt_loose_parameters(self) -> None:
        """Parameters that an optimizer steps and no prepared model holds still have to meet."""
        loose = {id(p): p for o in self.machine.optimizers for p in o.params() if id(p) not in self._owned}
        if loose:
            params = [p for p in loose.values() if isinstance(p, nn.Parameter) or p.is_leaf]
            models.equalise(params, self.world.gradients)
            self._add_sync([(f"parameter {i} of the optimizer", p, False) for i, p in enumerate(params)])  # type: ignore[misc]

    def _scheduler(self, scheduler: Any) -> Any:
        if not any(scheduler is known for known in self.schedulers):
            prepare_scheduler(scheduler, self.machine, self.mean)
            self.schedulers.append(scheduler)
            self.ready("scheduler", len(self.schedulers) - 1)
        return scheduler

    def adopt_loose_schedulers(self) -> None:
        """Schedulers of our optimizers that nobody prepared: a checkpoint without them would bring back other rates."""
        mine = {id(o.optimizer) for o in self.machine.optimizers}
        loose = [obj for obj in gc.get_objects() if issubclass(type(obj), SCHEDULERS)]
        inner = {
            id(s) for obj in loose for s in getattr(obj, "_schedulers", ())
        }  # their state is in the outer one's
        for scheduler in loose:
            if id(getattr(scheduler, "optimizer", None)) in mine and id(scheduler) not in inner:
                self._scheduler(scheduler)

    def _scaler(self, scaler: Any) -> Any:
        if not any(scaler is known for known in self.scalers):
            prepare_scaler(scaler, self.machine)
            self.scalers.append(scaler)
            self.ready("scaler", len(self.scalers) - 1)
        return scaler

    def _loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        if feed_of(loader) is not None:
            return loader
        feed = self.feed(loader, trains=True)
        self.feeds.append(feed)
        return prepare_loader(loader, feed)

    def feed(self, loader: DataLoader[Any], trains: bool) -> Feed:
        cut = build.cut(self.strategy, self.world)
        seed, side, device = self.strategy.seed, self.world.side, self.world.device
        deal = self.apart.feed() if self.apart is not None else None
        return Feed(loader, cut, seed, side, device, self.machine, self.trail, trains, deal)

    @property
    def seat(self) -> tuple[int, int]:
        """This worker's place among those that save together, and how many they are."""
        return self.apart.seat if self.apart is not None else (self.world.rank, self.world.size)

    @property
    def term(self) -> int | None:
        """In which those met last, where some may be gone."""
        return self.apart.term if self.apart is not None else None

    def track(self, obj: Any) -> Any:
        if not hasattr(obj, "state_dict") or not hasattr(obj, "load_state_dict"):
            raise UsageError(
                f"track() needs state_dict and load_state_dict, and {type(obj).__name__} lacks one"
            )
        self.machine.keepers.append(Tracked(obj))
        self.tracked.append(obj)
        self.ready("tracked", len(self.tracked) - 1)
        return obj

    def only(self, found: list[Any], what: str) -> Any:
        if len(found) == 1:
            return found[0]
        raise UsageError(
            f"run.step needs to know which {what}: {len(found)} were prepared",
            remedy=f"Prepare one, or give {what}=…",
        )
