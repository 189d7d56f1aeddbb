"""Strategy -> objects: the one place where a class is picked by name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon import coding, demands, judging
from echelon.apart import Apart
from echelon.comm.alone import AloneGroup
from echelon.comm.codecs.plan import pays
from echelon.comm.group import Group
from echelon.comm.pick import Groups, backend_for, device_for
from echelon.control.member import Member
from echelon.data.deal import Cut
from echelon.env import Place
from echelon.mesh.axes import Mesh, laid
from echelon.parallel.allreduce import AllReduceSync
from echelon.parallel.buckets import MIB
from echelon.parallel.coded import CodedWire
from echelon.parallel.first import FirstSync, Need
from echelon.parallel.pushpull import PushSync
from echelon.parallel.rounds import Around, LocalSync, Rounds
from echelon.parallel.stale import FreeSync, StaleSync
from echelon.parallel.sums import SumWire, servers_share
from echelon.parallel.wire import PlainWire, Wire
from echelon.ps.owned import outer_recipe
from echelon.ps.worker import Servers
from echelon.strategy import Strategy, require_built, require_whole

if TYPE_CHECKING:
    from echelon.step import Machine


@dataclass
class World:
    """Where this rank stands and what it talks through."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    groups: Groups
    mesh: Mesh
    """Who stands where."""
    everyone: Group
    """All ranks: first weights, and a word a step where gradients meet among fewer."""
    gradients: Group
    """Those that hold the same part of the model: carries the gradients of the first model; further models have groups of their own."""
    side: Group
    """Those that have the other parts of a batch: carries what scripts and norms exchange during forward and backward."""
    model: Group
    """Those that hold one replica of the model together: sums over all its parameters."""
    pipe: Group
    """Those among which micro-batches travel."""
    tensor: Group
    """Those that share each layer."""
    reads: Group
    """The same, for outputs that a script reads."""
    servers: Servers | None = None
    """The parameter servers of this run."""
    worker_hosts: tuple[str, ...] = ()

    @property
    def part(self) -> tuple[int, int]:
        """Which part of each batch is this rank's, and of how many."""
        return self.mesh.deal(self.rank)

    @property
    def leads(self) -> bool:
        """The first of those that hold one replica of the model: what they all do is counted once."""
        return self.mesh.model(self.rank)[0] == self.rank

    def pretend(self, so: bool) -> None:
        """Nothing counts, and nobody is asked for anything: until pretend(False)."""
        self.groups.pretend(so)
        if self.servers is not None:
            self.servers.pretend(so)

    def close(self) -> None:
        if self.servers is not None:
            self.servers.close()  # first: whoever meets there need not wait for a worker that came to its end
        self.groups.close()


def world(place: Place, strategy: Strategy, member: Member | None) -> World:
    """Joins the other ranks; blocks until all are there. A worker that was started again has not met them yet: see rejoin.py."""
    require_built(strategy)
    require_whole(strategy)
    demands.workers(strategy, place.world_size)
    device = device_for(place.local_rank)
    backend = backend_for(strategy.backend, device, place.world_size, bool(place.address))
    groups = Groups(backend, place.rank, place.world_size, device, member)
    groups.pretend(place.incarnation > 0)  # the others are somewhere in the script: rejoin.py
    made = arrange(groups, place, strategy)
    if strategy.form == "ps" and member is not None:
        num_servers = int(member.description.get("num_servers", 0))
        made.servers = Servers.of_run(member, num_servers, strategy.copies(num_servers))
        made.worker_hosts = tuple(str(seat["host"]) for seat in member.roster().values())
    return made


def rehearsed(place: Place, strategy: Strategy) -> World:
    """A world whose other ranks are pretended: what one rank would do can be seen, and nobody else is there."""
    require_built(strategy)
    require_whole(strategy)
    demands.workers(strategy, place.world_size)
    device = device_for(place.local_rank)
    return arrange(Groups("echo", place.rank, place.world_size, device, None), place, strategy)


def arrange(groups: Groups, place: Place, strategy: Strategy) -> World:
    """Who stands where, and the groups of those who act together; blocks until all are there."""
    mesh = laid(place.world_size, strategy.data, strategy.widths, strategy.tensor)
    whole, rank, everyone = mesh.sizes[0] == mesh.size, place.rank, groups.make()
    alone = AloneGroup(groups.device)

    def among(name: str, ranks: list[int]) -> Group:
        return alone if len(ranks) == 1 else groups.make(name, ranks)

    sharers = mesh.group(rank, "tensor") if not mesh.widths else [rank]
    return World(
        rank=rank,
        size=place.world_size,
        local_rank=place.local_rank,
        device=groups.device,
        groups=groups,
        mesh=mesh,
        everyone=everyone,
        gradients=everyone if whole else groups.make("gradients", mesh.replicas(rank)),
        side=groups.make("values", mesh.alike(rank)),
        model=among("norms", mesh.model(rank)),
        pipe=among("pipeline", mesh.pipe(rank)),
        tensor=among("tensor", sharers),
        reads=among("outputs", sharers),
    )


def grad_sync(
    strategy: Strategy,
    params: Sequence[tuple[str, nn.Parameter, bool]],
    group: Group,
    world: World,
    rounds: Rounds | None = None,
) -> AllReduceSync:
    """How this strategy lets the gradients of one model meet."""
    compression = coding.read(strategy.compress)
    sizes = {
        "bucket_bytes": int(strategy.bucket_mib * MIB),
        "first_bucket_bytes": int(strategy.first_bucket_mib * MIB),
    }
    if rounds is not None:
        return LocalSync(params, world.device, rounds, **sizes)
    if world.servers is not None and (strategy.dealt or strategy.update == "bounded"):
        if strategy.update == "sync":
            need = Need(strategy.backup, strategy.aggregate, strategy.loss == "mean")
            model = world.servers.new_model()
            first = FirstSync(params, group, world.servers, model, need, strategy.clip_norm, **sizes)
            first.nonfinite = strategy.nonfinite
            return first
        limits = (strategy.staleness, strategy.clip_norm)
        if strategy.update == "bounded":
            stale = StaleSync(params, group, world.servers, world.servers.new_model(), *limits, **sizes)
            stale.nonfinite = strategy.nonfinite
            return stale
        free = FreeSync(params, group, world.servers, world.servers.new_model(), *limits, **sizes)
        free.compensation, free.divided = strategy.compensation, strategy.stale_lr == "divided"
        free.nonfinite = strategy.nonfinite
        return free
    if world.servers is not None and strategy.apply == "server":
        pushes = PushSync(params, group, world.servers, world.servers.new_model(), **sizes)
        pushes.arrivals.wanted = not strategy.ema  # the average is moved with all values after every step
        return pushes
    wire: Wire = PlainWire(group)
    if compression and pays(group.size):
        wire = CodedWire(group, compression)
    elif world.servers is not None:
        hosts = (world.worker_hosts, world.servers.hosts)
        share = servers_share(*hosts) if strategy.servers_share < 0 else Fraction(strategy.servers_share)
        among = None if group.size == world.size else world.mesh.replicas(world.rank)
        if not group.local:
            wire = SumWire(group, world.servers, world.servers.new_model(), share, among)
    return AllReduceSync(params, group, wire=wire, **sizes)


def construction(strategy: Strategy) -> AbstractContextManager[Any]:
    """Around the construction of a model: recorded where a rank keeps a part of it, plain where it keeps everything anyway."""
    if not strategy.splits_model:
        return nullcontext()
    from echelon.parallel.building.recorder import recorded  # brings torch's fake tensors: half a second

    return recorded()


def apart(strategy: Strategy, world: World) -> Apart | None:
    """How workers go on without waiting for each other; None where they are at one place."""
    if not strategy.dealt or world.servers is None:
        return None
    return Apart(world.servers, world.rank, world.size, tells=strategy.update == "async")


def rounds(strategy: Strategy, world: World, machine: Machine) -> Rounds | None:
    """How copies of models meet; None where workers do not train copies."""
    if strategy.update != "local" or world.servers is None:
        return None
    recipe = outer_recipe(strategy.outer, strategy.outer_lr, strategy.outer_momentum)
    around = Around(
        before_change=lambda: machine.before_change(),
        following=lambda: machine.following(),
        in_loop=lambda: machine.current is not None,
        trained=lambda: {id(p) for optimizer in machine.optimizers for p in optimizer.params()},
        nonfinite=strategy.nonfinite,
        heed=lambda found: judging.heed_copy(machine, found),
    )
    return Rounds(world.servers, world.rank, strategy.local_steps, strategy.outer == "geo", recipe, around)


def cut(strategy: Strategy, world: World) -> Cut:
    """How this strategy cuts batches."""
    if strategy.dealt and world.servers is not None:
        whole = strategy.update == "async" or strategy.batch == "per-worker"
        pieces = 1 if whole else strategy.aggregate or max(1, world.size - strategy.backup)
        return Cut(accumulate=strategy.accumulate, microbatches=strategy.microbatches, pieces=pieces)
    if strategy.update == "local":
        alone = Cut(accumulate=strategy.accumulate, microbatches=strategy.microbatches)
        return replace(alone, first=world.rank, every=world.size)
    part, parts = world.part
    return Cut(
        rank=part,
        size=parts,
        accumulate=strategy.accumulate,
        microbatches=strategy.microbatches if strategy.stages == 1 else 1,
        together=1 if strategy.stages == 1 else strategy.microbatches,  # a pipeline cuts by itself
        per_worker=strategy.batch == "per-worker",
    )
