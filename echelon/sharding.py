"""What the form `sharded` makes of the models and optimizers of a run: levels 2 and 3 split the model, level 1 deals the optimizer's state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.comm.alone import AloneGroup
from echelon.errors import StrategyError, UsageError
from echelon.mesh import moves
from echelon.mesh.layout import Placed, Runs
from echelon.mesh.moves import Sharded
from echelon.parallel import elementwise
from echelon.parallel.buckets import MIB
from echelon.parallel.sharded import owners
from echelon.parallel.sharded.hosted import HOST, Hosted
from echelon.parallel.sharded.owned import Owned
from echelon.parallel.sharded.parts import Parts
from echelon.strategy import Strategy

if TYPE_CHECKING:
    from echelon.build import World
    from echelon.comm.group import Group
    from echelon.parallel.gradsync import Split as Lies
    from echelon.parallel.pipeline.lending import Uses
    from echelon.parallel.sharded.carry import Carrier
    from echelon.parallel.sharded.parted import PartedSync
    from echelon.parallel.sharded.split import Split
    from echelon.parallel.sharded.sync import ShardedSync
    from echelon.parallel.wire import Traffic
    from echelon.prepare.optimizer import PreparedOptimizer


WHAT = {
    1: "optimizer state",
    2: "gradients and optimizer state",
    3: "parameters, gradients and optimizer state",
}
"""What each level splits."""


class Sharding:
    """One a run; without the form, or with nobody to share with, it leaves everything as it is."""

    def __init__(self, strategy: Strategy, world: World, lies: Lies, placed_state: dict[int, Placed]) -> None:
        self.lies, self.placed, self.placed_state = lies, lies.placed, placed_state
        self._mesh: Any = None
        self.strategy, self.world = strategy, world
        ranks = world.mesh.replicas(world.rank)
        wanted = strategy.form == "sharded" and len(ranks) > 1
        self.level = strategy.level if wanted else 0
        if wanted and strategy.shard_workers and len(ranks) % strategy.shard_workers:
            raise StrategyError(
                f"shard_workers={strategy.shard_workers} does not divide the {len(ranks)} workers that have a copy of the model",
                remedy=f"Use a divisor of {len(ranks)}, or 0 for one copy among all of them.",
            )
        self.sets = owners.sets(ranks, strategy.shard_workers if self.level > 1 else 0)
        self.syncs: list[ShardedSync] = []
        self.parted: list[PartedSync] = []
        self.owned: Owned | None = None
        self.optimizers: list[PreparedOptimizer] = []
        self.replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self.whole_bytes = self.split_bytes = self.root_bytes = 0

    @property
    def splits(self) -> bool:
        """Do models lie in parts?"""
        return self.level > 1 and len(self.sets[0]) > 1

    @property
    def offloads(self) -> bool:
        """Does optimizer state move to the host? Where workers compute on CPUs it is there."""
        return self.strategy.offload and self.world.device.type != HOST.type

    # -- models --------------------------------------------------------------------------------------------------

    def check(self, model: nn.Module, known: set[int]) -> None:
        """Raises for a model that cannot be split; before anything is changed."""
        if self.splits and any(id(p) in self.placed for p in model.parameters()):
            raise UsageError(
                "this model holds parameters of another one that was split before",
                remedy="Put both into one module and prepare that, or use level=1: there models stay whole.",
            )
        if self.splits and any(id(p) in known for p in model.parameters()):
            raise UsageError(
                "this model's parameters were prepared before it, with their optimizer",
                remedy="Give prepare() the model first, or both in one call: a sharded model's parameters are made anew.",
            )

    def model(self, model: nn.Module, sparse: set[int], known: set[int]) -> ShardedSync | None:
        """Splits a model that is equal on all ranks, in place; gives how its gradients meet. None where it stays whole, or is cut into
        stages first: see staged()."""
        if not self.splits or self.strategy.stages > 1:
            return None
        from echelon.parallel.sharded import split
        from echelon.parallel.sharded.sync import ShardedSync
        from echelon.prepare.model import names

        world = self.world
        made = split.split(
            model,
            self._device_mesh(),
            level=self.level,
            unit_bytes=int(self.strategy.wrap_mib * MIB),
            sparse=sparse,
            known=known,
        )
        self.whole_bytes += sum(p.nbytes for p in made.whole)
        if not made.units:
            return None
        self.replaced |= made.replaced
        self._place(made)
        sync = ShardedSync(made.units, names(model), self._group(), self._carrier(), world.device)
        self.split_bytes += sum(_bytes(p.held) for p in sync.pieces)
        outermost = split.groups_of(made.units[-1])
        self.root_bytes += sum(_bytes(held) for part in outermost for held in part.fsdp_params)
        self.syncs.append(sync)
        _watch_zero_grad(model, sync)
        return sync

    def staged(
        self, model: nn.Module, params: Sequence[tuple[str, nn.Parameter, bool]], uses: Uses
    ) -> PartedSync | None:
        """Levels 2 and 3 of a rank's stages: `params` are whole and equal on its replicas. None where they stay so."""
        if not self.splits:
            return None
        from echelon.parallel.sharded import flat
        from echelon.parallel.sharded.parted import PartedSync

        if table := next((name for name, _, rows in params if rows), None):
            raise StrategyError(
                f"`{table}` has gradients that are rows (sparse=True), and level={self.level} in a pipeline cuts gradients into stretches",
                remedy="Use level=1, or sparse=False.",
            )
        laid = flat.lay(model, [p for _, p, _ in params], uses, int(self.strategy.wrap_mib * MIB))
        sync = PartedSync(
            laid,
            self._group(),
            self._carrier(),
            self.world.device,
            keeps=self.level == 2,
            defers=self.strategy.schedule == "zero-bubble",
        )
        for slot in sync.slots:
            self.placed[id(slot.param)] = owners.narrowed(
                self.placed[id(slot.param)], slot.start, slot.stop, self._alike()
            )
        self.lies.group = self._together()
        self.parted.append(sync)
        return sync

    def staged_lines(self, sync: PartedSync) -> list[str]:
        """What is split of this rank's stages, and what a step sends."""
        micros, sent = self.strategy.microbatches, self.staged_bytes(sync)
        return [
            f"of each stage {WHAT[self.level]} split over {len(self._mine)} workers (level {self.level}, {len(sync.units)} units here)",
            f"a step of {micros} micro-batches sends about {sent / MIB:.1f} MiB a worker for it",
        ]

    def staged_bytes(self, sync: PartedSync) -> float:
        """What a rank sends of its stages' parameters and gradients in one batch's micro-batches: from the sizes alone."""
        from echelon.parallel.sharded import flat

        size, micros = sum(unit.flat.nbytes for unit in sync.units), self.strategy.microbatches
        return flat.step_bytes(size, len(self._mine), len(self.sets), micros, keeps=self.level == 2)

    def kept(self, numel: int) -> int:
        """Of so many elements of a parameter that is cut by itself, those of this rank."""
        from echelon.parallel.sharded import flat

        if not self.splits:
            return numel
        start, stop = flat.stretch(numel, len(self._mine), self._mine.index(self.world.rank))
        return stop - start

    @property
    def _mine(self) -> list[int]:
        """The workers that share one copy of what this one holds."""
        return next(s for s in self.sets if self.world.rank in s)

    def _alike(self) -> set[int]:
        """Ranks that keep the same part of what they share."""
        mesh, each = self.world.mesh, self.strategy.shard_workers
        at = owners.position(mesh, self.world.rank, each)
        return {r for r in range(mesh.size) if owners.position(mesh, r, each) == at}

    def _together(self) -> Group:
        """Those that hold one copy of the model together, along all axes."""
        ranks = sorted({r for rank in self._mine for r in self.world.mesh.model(rank)})
        return self.world.groups.make("norms", ranks)

    def _group(self) -> Group:
        """Among which gradients meet, for one more model."""
        if not self.syncs and not self.parted:
            return self.world.gradients
        return self.world.groups.make(ranks=self.world.mesh.replicas(self.world.rank))

    def _carrier(self) -> Carrier:
        from echelon.parallel.sharded.carry import Carrier

        groups, mine = self.world.groups, self._mine
        shards = groups.make("shards", mine)
        alike = [s[mine.index(self.world.rank)] for s in self.sets]
        return Carrier(
            shards, groups.make("copies", alike) if len(alike) > 1 else AloneGroup(self.world.device)
        )

    def _place(self, made: Split) -> None:
        """Rows of each parameter, which may be a piece of a larger one already."""
        alike, at = self._alike(), self._mine.index(self.world.rank)
        everybody = tuple(range(self.world.size))
        for old, (_, param) in made.replaced.items():
            shape = made.shapes[id(param)]
            numel = math.prod(shape)
            whole = Placed(shape, (Runs(0, numel),) if numel else (), everybody)
            before = self.placed.pop(old, whole)
            start, stop = owners.rows(shape[0], len(self._mine), at)
            width = numel // shape[0]
            self.placed[id(param)] = owners.narrowed(before, start * width, stop * width, alike)
        for param in made.whole:
            if id(param) in self.placed and at:
                self.placed[id(param)] = replace(self.placed[id(param)], counts=False)

    def _device_mesh(self) -> Any:
        from echelon.parallel.sharded import split

        if self._mesh is None:
            self._mesh = split.device_mesh(self._mine, self.world.size, self.world.device)
            self.lies.group = self._together()
        return self._mesh

    def own(self, params: list[tuple[str, nn.Parameter, bool]], group: Group, traffic: Traffic) -> None:
        """Level 1: who has the optimizer state of these parameters. They are stepped by their owner, and met by all."""
        if self.level != 1 or not params:
            return
        chosen = owners.owners([p.nbytes for _, p, _ in params], group.size)
        ranks = self.world.mesh.replicas(self.world.rank)
        self.split_bytes += sum(p.nbytes for _, p, _ in params)
        if self.owned is None:
            self.owned = Owned(group, {}, traffic)
            for prepared in self.optimizers:
                prepared.owned = self.owned
        for (_, param, _), owner in zip(params, chosen, strict=True):
            self.owned.owner[id(param)] = owner
            self.placed_state[id(param)] = owners.placed_state(
                tuple(param.shape), ranks[owner], self.world.rank
            )

    # -- optimizers ----------------------------------------------------------------------------------------------

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Before it is prepared: it steps what the model has now."""
        if not self.level:
            return
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS takes all parameters as one vector, and under `sharded` no worker has all of them, or all of their state",
                remedy="Use --strategy allreduce with it, or another optimizer.",
            )
        if self.splits and self.strategy.stages > 1:
            kind = type(optimizer)
            if why := elementwise.looks_at_whole(kind.__name__, kind.__module__):
                raise StrategyError(
                    f"{kind.__name__} with level={self.level} in a pipeline: {why}, and here each worker has stretches of them",
                    remedy="Use level=1, where every parameter is stepped whole by its owner, or an optimizer that steps element by element.",
                )
        if self.replaced:
            from echelon.parallel.sharded import split

            split.repoint(optimizer, self.replaced)

    def adopted(self, prepared: PreparedOptimizer) -> None:
        """Once it is prepared."""
        self.optimizers.append(prepared)
        if self.owned is not None:
            prepared.owned = self.owned
            self.owned.drop_state(prepared.optimizer)
        if self.offloads:
            prepared.parts = Hosted(prepared.optimizer)
        elif self.splits:
            prepared.parts = Parts(prepared.optimizer)

    def reshard(self) -> None:
        """Parameters have changed: what a forward gathered before is of no use."""
        for sync in self.syncs:
            sync.reshard()

    # -- told ----------------------------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        """What is split, and what a step sends, for the first lines of a run."""
        return [*self._split_lines(), *self._offload_lines()]

    def _offload_lines(self) -> list[str]:
        if not self.strategy.offload:
            return []
        if not self.offloads:
            return ["offload: these workers compute on CPUs, where optimizer state is in host memory anyway"]
        return ["offload: optimizer state in host memory, where steps are computed"]

    def _split_lines(self) -> list[str]:
        if not self.level or not (self.syncs or self.owned):
            return []
        workers = len(self.sets[0])
        copies = f", {len(self.sets)} copies" if len(self.sets) > 1 else ""
        units = sum(len(sync.units) for sync in self.syncs)
        detail = f"level {self.level}" + (f", {units} unit{'s' * (units > 1)}" if units else "") + copies
        whole = f" · {self.whole_bytes / MIB:.1f} MiB stay whole" if self.whole_bytes else ""
        return [
            f"{WHAT[self.level]} split over {workers} workers ({detail}){whole}",
            f"a step sends about {self.step_bytes(self.strategy.accumulate * self.strategy.microbatches) / MIB:.1f} MiB a worker",
        ]

    def step_bytes(self, micros: int = 1) -> float:
        """What a rank sends of what is split, in a step of so many forwards: from the sizes alone."""
        return moves.sharded(
            Sharded(
                level=self.level,
                split=self.split_bytes,
                outermost=self.root_bytes,
                ranks=len(self.sets[0]),
                copies=len(self.sets),
                micros=micros,
            )
        )


def _watch_zero_grad(model: nn.Module, sync: ShardedSync) -> None:
    from echelon.prepare.model import Override

    def wrap(inner: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(set_to_none: bool = True) -> None:
            sync.zero(set_to_none)
            inner(set_to_none=set_to_none)

        return zero_grad

    Override(model, "zero_grad", wrap)


def _bytes(held: object) -> int:
    param = held.sharded_param  # type: ignore[attr-defined]
    return int(param.numel() * param.element_size())
