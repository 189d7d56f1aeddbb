"""What a script handed to prepare() and track(), by kind and in order, and how each is made ready."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from echelon import build, facts, staging
from echelon.apart import Apart
from echelon.errors import StrategyError, UsageError
from echelon.loop import Stepping
from echelon.mesh import memory
from echelon.mesh.layout import Placed, Stateful
from echelon.mesh.memory import Training
from echelon.parallel import needs, norm, rounds
from echelon.parallel.average import Average
from echelon.parallel.building import recipe
from echelon.parallel.building.later import Later
from echelon.parallel.coded import CodedWire
from echelon.parallel.finite import Watch
from echelon.parallel.first import FirstSync
from echelon.parallel.kept import Backwards
from echelon.parallel.sharded.sync import ShardedSync
from echelon.parallel.stale import FreeSync
from echelon.parallel.tensor import form as tensors
from echelon.piped import Piped
from echelon.prepare import model as models
from echelon.prepare.keep import Buffers, Hyper, Tensors, Tracked
from echelon.prepare.loader import Feed, feed_of, prepare_loader
from echelon.prepare.optimizer import PreparedOptimizer, prepared_optimizer, warmup_factor
from echelon.prepare.scheduler import prepare_scaler, prepare_scheduler
from echelon.prepare.trail import Trail
from echelon.sharding import Sharding
from echelon.step import Machine
from echelon.strategy import Strategy
from echelon.vertical import Tables, Vertical

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
        run_name: str = "",
    ) -> None:
        self.strategy, self.world, self.machine, self.norms = strategy, world, machine, norms
        self.apart = apart
        """Where workers are not at one place; None where they are."""
        self.trail, self.warn, self.mean, self.run_name = trail, warn, mean, run_name
        self.models: list[nn.Module] = []
        self.feeds: list[Feed] = []
        self.schedulers: list[Any] = []
        self.scalers: list[Any] = []
        self.tracked: list[Stateful] = []
        self.averages: dict[int, Average] = {}
        self.placed: dict[int, Placed] = machine.split.placed
        """By a parameter's id: what of it is here. Filled by forms that split the model, before anything is restored."""
        self.placed_state: dict[int, Placed] = {}
        """By a parameter's id: what of its optimizer's state is here, where that lies otherwise than the parameter itself."""
        self.placed_buffers: dict[str, Placed] = {}
        """By a buffer's name in checkpoints (`model1/…` for a second model): a module may put another tensor in its stead."""
        self.shared: dict[int, tensors.Shared] = {}
        """By a model's id: what of it is split over the tensor axis."""
        self.piped: dict[int, Piped] = {}
        """By a model's id: those that are cut into stages."""
        self.tables = Tables(strategy, world, machine)
        """Data whose columns lie on several workers."""
        self.say: Callable[[list[str]], None] = lambda lines: None
        self.ready: Callable[[str, int], None] = lambda kind, index: None
        self.stop_wanted: Callable[[], bool] = lambda: False
        self.saves = 0
        """How often the script asked for a checkpoint."""
        self.rounds = build.rounds(strategy, world, machine)
        """With update=local: where copies of the models meet."""
        self.strict_watch = models.Ran() if strategy.strict else None
        self.sharding = Sharding(strategy, world, machine.split, self.placed_state)
        """With `sharded`: what is split, and who has what of it."""
        self.later: dict[int, Later] = {}
        """Recorded models, by id, whose parts are made once they are cut."""
        self.needs: tuple[Training, int] | None = None
        """What training takes in memory, and what this process had before."""
        self.graphs = Backwards(world.device)
        """What forwards keep for their backwards: looked at in the first step."""
        self.graphs.leave_out(lambda: (t for m in self.models for t in (*m.parameters(), *m.buffers())))
        self._owned: set[int] = set()
        self._told_uneven = False
        machine.at_snapshot.append(self.adopt_loose_parameters)
        machine.before_meeting = lambda optimizer: self.adopt_loose_parameters()
        machine.after_apply.append(self._applied)
        if self.sharding.splits:
            machine.after_apply.append(lambda optimizer: self.sharding.reshard())

    def prepare(self, objects: tuple[Any, ...], loader_options: dict[str, Any]) -> Any:
        self._require_room(objects)
        self.tables.meet(objects, self.models)
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

    def _require_room(self, objects: tuple[Any, ...]) -> None:
        """Before the first byte is allocated for gradients or state."""
        optimizers = [o for o in objects if isinstance(o, torch.optim.Optimizer)]
        models = [o for o in objects if isinstance(o, nn.Module)]
        if not optimizers and not models:
            return
        base = 0 if self.models else needs.base(models, self.world.device)
        optimizers += [o.optimizer for o in self.machine.optimizers]
        unit_bytes = int(self.strategy.wrap_mib * memory.MIB)
        found = needs.training([*self.models, *models], optimizers, bool(self.strategy.ema), unit_bytes)
        self.needs = found, self.needs[1] if self.needs else base
        have = needs.room(self.world.device, self.run_name)
        short = needs.require_room(found, self.strategy, self.world.size, have, base)
        if short:
            self.warn(short)

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
        self.sharding.check(model, self._owned)
        recorded = recipe.is_recorded(model)
        if recorded:
            recipe.agree(recipe.recipe_of(model), self.world.everyone)
        else:
            model.to(self.world.device)
            models.equalise([*model.parameters(), *model.buffers()], self.world.everyone)
        if recorded and self.tables.sides is not None:
            recipe.materialise(model)
        if not self.tables.split(self, model):
            staging.share(self, model)
            if recorded:
                self._make(model)
        if self.strategy.sync_batchnorm and not self.strategy.alone:
            norm.synchronise(model, self.norms)
        if self.strategy.precision != "fp32":
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.strategy.precision]
            models.compute_in(model, dtype, self.world.device)
        sparse = models.sparse_params(model)
        split = self.sharding.model(model, sparse, self._owned)
        names = models.names(model)
        params = {id(p): p for p in model.parameters() if p.is_floating_point() or p.is_complex()}
        fresh = [(names.get(i, "?"), p, i in sparse) for i, p in params.items() if i not in self._owned]
        if self.strict_watch is not None:
            self.strict_watch.watch(model)
        if self.strategy.stages > 1:
            self._owned |= {id(p) for _, p, _ in fresh}
            self.piped[id(model)] = Piped(
                model, self.strategy, self.world, self.machine, staging.around(self, fresh)
            )
        else:
            self._owned |= {id(p) for _, p, _ in fresh}
            self._meeting(model, self.tables.mine(fresh, self.placed), split)
        models.watch_zero_grad(model, self.machine)
        self.machine.keepers.append(Buffers(model))
        if self.strategy.ema:
            average = self.averages[id(model)] = Average(model, self.strategy.ema)
            kept = Tensors(average.shadow)
            average.on_begin = kept.follow
            if id(model) not in self.later:
                average.begin(self.placed)
            self.machine.keepers.append(kept)
        self.models.append(model)
        self.graphs.begin()
        self.ready("model", len(self.models) - 1)
        return model

    def _make(self, model: nn.Module) -> None:
        """A model of run.build(): each rank makes its part, under pipeline once it is cut, and where sharding splits it, there."""
        device = self.world.device
        if self.strategy.stages > 1:
            self.later[id(model)] = Later(model, device)
        elif not self.sharding.splits:
            recipe.materialise(model, keep=lambda name, tensor: tensor.to(device))

    def make_whole(self) -> None:
        """Models that are not made yet are, whole: for who reads or writes their tensors before the first step."""
        for model in [m for m in self.models if id(m) in self.later]:
            self.make(model)

    def make(self, model: nn.Module, here: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        """Of a model that waits for its cut: the parameters of which `here` is true are made, and its average begins."""
        self.later.pop(id(model)).make(here)
        if average := self.averages.get(id(model)):
            average.begin(self.placed)

    def _meeting(
        self, model: nn.Module, fresh: list[tuple[str, nn.Parameter, bool]], split: ShardedSync | None
    ) -> None:
        """How a model's gradients meet: what is split by `split`, the rest as everywhere."""
        watch = models.Watch(model, self.machine)
        watch.gave = self.graphs.gave
        if split is not None:
            fresh = [(name, p, rows) for name, p, rows in fresh if id(p) not in split.by_param]
            self.register(split, set(split.by_param))
        sync = self.add_sync(fresh) if fresh or split is None else split
        self.sharding.own(fresh, sync.group, sync.wire.traffic)
        (split or sync).on_met = watch.backward_over
        if self.rounds is not None:
            sync.moments = lambda: rounds.moments_of(model)

    def add_sync(self, params: list[tuple[str, nn.Parameter, bool]]) -> Any:
        group = self.world.gradients
        if self.machine.syncs and not group.local:
            group = self.world.groups.make(ranks=self.world.mesh.replicas(self.world.rank))
        sync = build.grad_sync(self.strategy, params, group, self.world, self.rounds)
        self.register(sync, {id(p) for _, p, _ in params})
        return sync

    def register(self, sync: Any, params: set[int]) -> None:
        """The machine knows of a meeting from now on; `params` are the ids of what meets there."""
        # in a pipeline all backwards are run.step's, and nobody looks at gradients in between
        sync.on_uneven = self._uneven if self.strategy.stages == 1 else None
        sync.stop_wanted = lambda: self.stop_wanted()
        sync.saves = lambda: self.saves
        if isinstance(sync, FreeSync):
            sync.pieces, sync.leads = self._held, lambda: self.seat[0] == 0
        if isinstance(sync, FirstSync):
            self._one_model()
            sync.count = self._samples
            sync.on_dropped = self._dropped
            sync.desk = self.apart.desk if self.apart is not None else sync.desk
        self._owned |= params
        self.machine.syncs.append(sync)
        if self.strategy.nonfinite == "refuse" and sync.applies_here and not sync.group.local:
            self.machine.watches[id(sync)] = Watch(sync.wire)
        if isinstance(sync.wire, CodedWire):
            self.machine.keepers.append(sync.wire)
        self._link()

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
            self.machine.counters.given(-loader.samples(), 0)  # others will have them
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
            for shared in self.shared.values():
                tensors.split_state(optimizer, shared.pieces, self.warn)
            self.tables.optimizer(optimizer)
            self.sharding.optimizer(optimizer)
            recipe.settle(optimizer)
            prepared = PreparedOptimizer(optimizer, self.machine)
            self.sharding.adopted(prepared)
            self.machine.keepers.append(Hyper(optimizer))
            if self.strategy.batch == "per-worker" and self.strategy.scale_lr:
                prepared.lr_factor = warmup_factor(self.world.part[1], self.strategy.warmup_steps)
            self._link()
            self.ready("optimizer", prepared.index)
        return optimizer

    def adopt_loose_parameters(self) -> None:
        """Parameters that an optimizer steps and no prepared model holds still have to meet."""
        loose = {id(p): p for o in self.machine.optimizers for p in o.params() if id(p) not in self._owned}
        if loose:
            params = [p for p in loose.values() if isinstance(p, nn.Parameter) or p.is_leaf]
            models.equalise(params, self.world.everyone)
            self.add_sync([(f"parameter {i} of the optimizer", p, False) for i, p in enumerate(params)])  # type: ignore[misc]

    def _scheduler(self, scheduler: Any) -> Any:
        if not any(scheduler is known for known in self.schedulers):
            prepare_scheduler(scheduler, self.machine, self.mean)
            self.schedulers.append(scheduler)
            self.ready("scheduler", len(self.schedulers) - 1)
        return scheduler

    def adopt_loose_schedulers(self) -> None:
        """Schedulers of our optimizers that nobody prepared: a checkpoint without them would bring back other rates."""
        loose = _schedulers_of([o.optimizer for o in self.machine.optimizers])
        inner = {
            id(s) for obj in loose for s in getattr(obj, "_schedulers", ())
        }  # their state is in the outer one's
        for scheduler in loose:
            if id(scheduler) not in inner:
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
        self.tables.meet([loader], self.models)
        cut = build.cut(self.strategy, self.world)
        cut = cut if trains else replace(cut, together=1)  # nothing is cut in evaluations
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

    def stepper(self, model: nn.Module) -> Piped | Vertical | None:
        """Who does a model's steps where run.step does not do them by itself."""
        return self.piped.get(id(model)) or self.tables.models.get(id(model))

    def only(self, found: list[Any], what: str) -> Any:
        if len(found) == 1:
            return found[0]
        raise UsageError(
            f"run.step needs to know which {what}: {len(found)} were prepared",
            remedy=f"Prepare one, or give {what}=…",
        )


def _schedulers_of(optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    """Every scheduler that holds one of these optimizers, in an order that all workers have. One pass over what the process holds: some 20 ms."""
    mine = {id(optimizer): index for index, optimizer in enumerate(optimizers)}
    holders = gc.get_referrers(*optimizers)
    spaces = [each for each in holders if type(each) is dict and id(each.get("optimizer")) in mine]
    if spaces:  # attributes that somebody looked at as a whole are a dictionary of their own
        holders += gc.get_referrers(*spaces)
    found = {id(each): each for each in holders if issubclass(type(each), SCHEDULERS)}
    held = [each for each in found.values() if id(getattr(each, "optimizer", None)) in mine]
    return sorted(held, key=lambda each: (mine[id(each.optimizer)], type(each).__qualname__))
