"""Runs as tests make and see them: the one place in the tests that knows what is inside a run.

Tests, and the scripts that they start, use the public face of echelon and what stands here; `tests/unit/test_tests.py` holds them to it.
Whoever builds the inside anew changes this file and no test.

    making        run_of_one, run_beside, runs_among_threads
    samples       note_samples, committed_samples, samples_of_the_last_loop
    how it went   lost_steps, skipped_updates, take_lost_operations, rates_of_steps
    saved         stop_at_step, when_it_arrives, has_arrived, finish_saving, come_to_the_end, wait_for_everybody, averages, State
    split         where_it_lies, num_placed, lines_of_layers, lay, as_rank
    groups        group_of, new_group, has_servers
    bytes         sent_bytes, expected_bytes, forms_of_sums, owed_by_name
    servers       values_come_behind, num_hidden, when_servers_stepped, updates_of_servers
    no run        Meeting (all-reduced), PushMeeting, PartedMeeting, SplitModel
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from echelon import away, build, coding, expected, judging, owed
from echelon import strategy as strategies
from echelon.build import World
from echelon.checkpoint.holding import Holding
from echelon.checkpoint.load import Saved
from echelon.clock import Deadline
from echelon.comm.alone import AloneGroup
from echelon.comm.group import Group, Lost, Outcome
from echelon.comm.pick import Groups
from echelon.comm.threads import Room
from echelon.env import Place
from echelon.events import Event
from echelon.mesh.axes import Mesh, laid
from echelon.mesh.layout import Placed
from echelon.parallel import arriving, clip, kept
from echelon.parallel.allreduce import AllReduceSync
from echelon.parallel.coded import CodedWire
from echelon.parallel.gradsync import Share, Split
from echelon.parallel.pushpull import PushSync
from echelon.prepare.scheduler import _found_anywhere
from echelon.ps.worker import Servers
from echelon.run import Run
from echelon.strategy import Strategy

SOON_S = 60.0

_meshes: weakref.WeakKeyDictionary[Run, dict[Mesh, World]] = weakref.WeakKeyDictionary()
"""By a launch's run: the worlds of other meshes that were made in it. Making groups costs more than most runs."""
_numbers = itertools.count(1)
"""Of the runs with checkpoints that were made here."""


# -- making ------------------------------------------------------------------------------------------------------------


def run_of_one(folder: Path | None = None, events: list[Event] | None = None, **fields: Any) -> Run:
    """A run of one worker in this process. Its checkpoints lie in `folder`, its events in the list; `fields` are the strategy's."""
    place = Place(run=folder.name, run_dir=folder) if folder is not None else Place()
    return Run(place, Strategy(**fields), None, _into(events))


def run_beside(
    first: Run,
    strategy: Strategy | str | None = None,
    *,
    folder: Path | None = None,
    events: list[Event] | None = None,
    **fields: Any,
) -> Run:
    """Another run of the workers that `first` (of echelon.init) has, over the same groups and servers.

    All workers make the same ones in the same order. A mesh that is not the launch's gets groups of its own, made once. With
    `folder` it can save and resume, and its checkpoints lie there; its events go where those of `first` go, or into the list.
    """
    look_no_more()
    gc.collect()
    gc.freeze()  # what is here now is not looked through by the collections of this run: torch, and what earlier runs left
    if isinstance(strategy, str):
        strategy = strategies.merge(strategies.parse(strategy) | fields)
    chosen = strategy or Strategy(**fields)
    emit, world = first.emit if events is None else events.append, _world_for(first, chosen)
    if folder is None:
        return Run(first.place, chosen, None, emit, world=world)
    place = dataclasses.replace(first.place, run_dir=folder)
    run = Run(place, chosen, first.member, emit, world=world)
    number = next(_numbers)
    if first.member is not None:
        run.keeping.saver._number = 1000 * number  # its words on the coordinator's board are used once
    return run


def runs_among_threads(size: int, act: Callable[[Run], Any], **fields: Any) -> list[Any]:
    """What act(run) gave on each worker of a run whose workers are threads of this process; raises what the first of them raised.

    Threads share torch's random stream and the faults that were ordered."""
    rooms: dict[tuple[tuple[int, ...], int], list[Any]] = {}
    strategy, lock, found = Strategy(**fields), threading.Lock(), [None] * size
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            place = Place(rank=rank, local_rank=rank, world_size=size)
            world = build.arrange(_Threads(rank, size, rooms, lock), place, strategy)
            found[rank] = act(Run(place, strategy, None, lambda event: None, world=world))
        except BaseException as error:
            errors.append(error)
            for groups in list(rooms.values()):
                groups[0].abort(f"worker {rank}: {error}")  # the others need not wait for it

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    if errors:
        raise errors[0]
    return found


class _Threads(Groups):
    """The groups of a worker that is a thread; `rooms` are everybody's."""

    def __init__(
        self, rank: int, size: int, rooms: dict[tuple[tuple[int, ...], int], list[Any]], lock: Any
    ) -> None:
        super().__init__("threads", rank, size, torch.device("cpu"), None)
        self._rooms, self._lock = rooms, lock
        self._asked: dict[tuple[int, ...], int] = {}

    def make(self, name: str = "gradients", ranks: Sequence[int] | None = None) -> Group:
        among = tuple(range(self.size)) if ranks is None else tuple(ranks)
        number = self._asked[among] = self._asked.get(among, 0) + 1
        with self._lock:
            groups = self._rooms.setdefault((among, number), Room(len(among)).groups())
        group = AloneGroup(self.device) if len(among) == 1 else groups[among.index(self.rank)]
        self.made.append(group)
        return group


def _into(events: list[Event] | None) -> Callable[[Event], None]:
    return (lambda event: None) if events is None else events.append


def _world_for(first: Run, strategy: Strategy) -> World:
    world: World = first.world
    mesh = laid(world.size, strategy.data, strategy.widths, strategy.tensor)
    if mesh == world.mesh:
        return world
    made = _meshes.setdefault(first, {})
    if mesh not in made:
        arranged = build.arrange(world.groups, first.place, strategy)
        made[mesh] = dataclasses.replace(arranged, servers=world.servers, worker_hosts=world.worker_hosts)
    return made[mesh]


# -- samples -----------------------------------------------------------------------------------------------------------


def note_samples(loader: DataLoader[Any]) -> None:
    """From now on a prepared loader remembers the numbers of the samples that this worker had."""
    loader._feed.ledger.keep_ids = True


def committed_samples(loader: DataLoader[Any], *, over: bool = True) -> dict[int, list[Any]]:
    """Epoch -> the samples that this worker had in steps that were committed. `over`: its loops are, so its last step counts as well."""
    if over:
        loader._feed.mark()
    return {epoch: list(entry.ids) for epoch, entry in loader._feed.ledger.epochs.items()}


def samples_of_the_last_loop(run: Run) -> int:
    """How many this worker had in the loop that ended last."""
    return run.machine.last_loop


# -- how it went -------------------------------------------------------------------------------------------------------


def lost_steps(run: Run) -> int:
    """Steps that were lost and made again."""
    return run.machine.counters.lost_steps


def skipped_updates(run: Run) -> int:
    """Updates that this worker told of as skipped."""
    return run.machine.counters.skipped


def take_lost_operations(run: Run) -> list[Lost]:
    """What was lost beside the gradients since the last step; the next one does not hear of it."""
    found, run.machine.side_losses = list(run.machine.side_losses), []
    return found


def rates_of_steps(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rate of every step that a prepared optimizer makes from now on, as it makes them."""
    prepared, rates = optimizer._echelon, []
    inner = prepared._inner_step

    def step(*args: Any) -> Any:
        rates.append(optimizer.param_groups[0]["lr"])
        return inner(*args)

    prepared._inner_step = step
    return rates


# -- saved and resumed -------------------------------------------------------------------------------------------------


def stop_at_step(run: Run, step: int) -> None:
    """This worker is asked to stop in the step of that number, as by SIGTERM: the run saves there and raises Preempted."""
    run.prepared.stop_wanted = lambda: run.global_step + 1 >= step


def is_asked_to_stop(run: Run) -> bool:
    """Has this worker heard that the whole run is to stop?"""
    return run.member is not None and run.member.stop_requested


def when_it_arrives(run: Run, act: Callable[[], None]) -> None:
    """Calls `act` when the script of a resumed run is at the place where it was left, and all is restored."""
    arrive = run.keeping.arrive

    def arrived() -> None:
        arrive()
        act()

    run.keeping.arrive = arrived


def has_arrived(run: Run) -> bool:
    """Is the script of a resumed run where it was left, or beyond it?"""
    return not run.trail.following


def finish_saving(run: Run) -> None:
    """Blocks until its checkpoints are written; it takes no more. Other runs of its world go on."""
    run.keeping.close()


def come_to_the_end(run: Run) -> None:
    """What happens where the script ends: LoopError where it never came to the place at which it was left."""
    run.keeping.check_arrived()


def wait_for_everybody(run: Run) -> None:
    """Blocks until all workers have made their last step, and the parameters here have seen it."""
    run.machine.drain(all_here=True)


def look_no_more() -> None:
    """Runs of this process whose first step never ended look at no further backward: after each test."""
    for one in list(kept.watch.looking):
        one.end()


def averages(run: Run, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Each parameter of which something is here, with its moving average; [] without `ema`."""
    if not run.strategy.ema:
        return []
    average = run.averages[id(model)]
    return list(zip(average.live, average.shadow, strict=True))


class State:
    """What a checkpoint of this rank would hold, and what it gives back."""

    def __init__(self, run: Run) -> None:
        self._whole = run.keeping.whole

    def holdings(self) -> list[Holding]:
        return self._whole.holdings()

    def objects(self) -> dict[str, Any]:
        return self._whole.objects()

    def restore(self, saved: Saved, rank: int) -> None:
        """Everything becomes what `saved` has of it; what is no tensor, what that rank had."""
        self._whole.restore(saved, saved.objects(rank))

    def is_absent(self, name: str) -> bool:
        """Does this buffer lie on other ranks only?"""
        return self._whole._absent(name)


# -- models that lie over several ranks --------------------------------------------------------------------------------


def where_it_lies(run: Run, name: str, tensor: Tensor) -> Placed | None:
    """What of a parameter or buffer is here; None where it is whole."""
    return run.prepared.placed.get(id(tensor)) or run.prepared.placed_buffers.get(name)


def num_placed(run: Run) -> tuple[int, int]:
    """How many parameters lie over several ranks, and of how many the optimizer's state does so otherwise than they do themselves."""
    return len(run.prepared.placed), len(run.prepared.placed_state)


def lines_of_layers(run: Run, model: nn.Module) -> list[str]:
    """What the first lines say of the layers that are split over the tensor axis."""
    return run.prepared.shared[id(model)].lines()


def lay(run: Run, model: nn.Module, name: str, lies: Placed) -> None:
    """The run takes it that of this parameter or buffer what `lies` says is here, as a form would have left it. A parameter's average
    follows: zeros like what it is, or none where nothing is here."""
    param = dict(model.named_parameters()).get(name)
    if param is None:
        run.prepared.placed_buffers[name] = lies
        return
    run.prepared.placed[id(param)] = lies
    average = run.averages.get(id(model))
    if average is not None and not lies.runs:
        average.drop([param])
    elif average is not None:
        at = next(i for i, p in enumerate(average.live) if p is param)
        average.shadow[at] = torch.zeros_like(param)


def as_rank(run: Run, rank: int, mesh: Mesh) -> None:
    """A run of one saves and restores from now on as that rank of such a mesh would; it still meets nobody."""
    world = dataclasses.replace(run.world, rank=rank, size=mesh.size, mesh=mesh)
    run.prepared.world = run.keeping.whole.world = world


# -- groups ------------------------------------------------------------------------------------------------------------


def group_of(run: Run, what: str = "gradients") -> Group:
    """Who meets for the "gradients" of the first model, for "values" (reduce, gather) or in a layer that is split ("tensor")."""
    return {"gradients": run.world.gradients, "values": run.world.side, "tensor": run.world.tensor}[what]


def new_group(run: Run, name: str) -> Group:
    """One more group of all workers; all of them make it."""
    return run.world.groups.make(name)


def has_servers(run: Run) -> bool:
    return run.world.servers is not None


# -- bytes -------------------------------------------------------------------------------------------------------------


def sent_bytes(run: Run) -> int:
    """What this worker's gradients took on their way so far."""
    return sum(sync.wire.traffic.sent_bytes for sync in run.machine.syncs)


def moved_bytes(run: Run) -> dict[str, float]:
    """All that this worker moved so far, by the wires' own counters."""
    servers = run.world.servers
    return {
        "among workers": run.world.groups.sent_bytes,
        "to and from servers": servers.moved_bytes if servers is not None else 0,
    }


def expected_bytes(run: Run) -> float:
    """What a step of a split model is predicted to send."""
    return run.prepared.sharding.step_bytes()


def forms_of_sums(run: Run) -> list[str]:
    """How the sums of coded gradients travel, bucket by bucket; those that are not rows are left out."""
    return [coder.plan.form for coder in _coders(run) if hasattr(coder, "plan")]


def owed_by_name(run: Run) -> dict[str, Tensor]:
    """All that coding left out so far on this worker, by parameter."""
    return {slot.name: coder.owed(slot) for coder in _coders(run) for slot in coder.bucket.slots}


def _coders(run: Run) -> Iterator[Any]:
    for wire in owed.coded(run.machine.syncs):
        yield from wire.coders


# -- servers that step -------------------------------------------------------------------------------------------------


def values_come_behind() -> None:
    """With apply=server values come behind the next forward in this process, on one host and of small models too."""
    arriving.LOCAL, arriving.WORTH_BYTES = True, 0


def num_hidden(run: Run) -> int:
    """How many steps' values came behind a forward."""
    return sum(sync.arrivals.hidden for sync in run.machine.syncs)


def when_servers_stepped(act: Callable[[], None]) -> None:
    """From now on calls `act` in this process whenever servers have made a step of some optimizer, before step() returns."""
    applied = PushSync.apply

    def apply(self: PushSync, *args: Any) -> Outcome:
        outcome = applied(self, *args)
        act()
        return outcome

    PushSync.apply = apply  # type: ignore[method-assign]


def updates_of_servers(run: Run) -> list[int]:
    """How many updates each server says it has made of the first model, where the first parts make one."""
    held, deadline = run.machine.syncs[0].held, Deadline.after(SOON_S)

    def asked(way: Any, room: Any) -> int:
        reply = way.call("part.fold", {"model": held.model, "log": []}, out=[room])
        return int(reply.wait(deadline).head["updates"])

    return [asked(*pair) for pair in zip(held.servers.links, held.rooms(), strict=False)]


# -- a meeting without a run -------------------------------------------------------------------------------------------


class Meeting:
    """How the gradients of one model meet, without a run around it: the verbs that a step has for it, and what is to be seen of it."""

    def __init__(self, sync: Any) -> None:
        self._sync = sync

    @classmethod
    def all_reduced(cls, model: nn.Module, group: Group, compress: str = "none", **sizes: int) -> Meeting:
        """Gradients are summed over `group`. `sizes` are those of buckets, in bytes; tables with sparse gradients are known by their kind."""
        sparse = {id(m.weight) for m in model.modules() if getattr(m, "sparse", False)}
        params = [(name, p, id(p) in sparse) for name, p in model.named_parameters()]
        compression = coding.read(compress)
        wire = {"wire": CodedWire(group, compression)} if compression is not None else {}
        return cls(AllReduceSync(params, group, **wire, **sizes))

    def begin(self, **share: Any) -> None:
        """A micro-step begins: weight, counts, last and sums_to_one say what this worker's gradients count for."""
        self._sync.begin(Share(**share))

    def finish(self) -> None:
        self._sync.finish()

    def seal(self, params: Iterable[Tensor]) -> None:
        self._sync.seal(params)

    def withdraw(self, params: Iterable[Tensor]) -> None:
        self._sync.withdraw(params)

    def applied(self, params: Iterable[Tensor]) -> None:
        self._sync.applied(params)

    def commit(self, step: int = 1) -> Outcome:
        return self._sync.commit(step)

    def settled(self) -> None:
        self._sync.settled()

    def forget(self) -> None:
        self._sync.forget()

    def drain(self) -> None:
        self._sync.drain()

    # -- messages

    @property
    def names(self) -> list[list[str]]:
        """Of the parameters, by message."""
        return [[slot.name for slot in bucket.slots] for bucket in self._sync.buckets]

    @property
    def num_left(self) -> int:
        """Messages that are on their way already."""
        return self._sync.next_bucket

    @property
    def memory(self) -> set[int]:
        """Where the gradients of each message lie."""
        return {bucket.flat.untyped_storage().data_ptr() for bucket in self._sync.buckets}

    @property
    def sent_bytes(self) -> float:
        return self._sync.wire.traffic.sent_bytes

    @property
    def plain_bytes(self) -> float:
        """What they would have been without coding."""
        return self._sync.wire.traffic.plain_bytes

    @property
    def expected_bytes(self) -> float | None:
        """What a step is predicted to send; None where nobody can tell."""
        return expected._meeting(self._sync, 1)

    def cut_anew(self) -> None:
        """Messages are cut anew, from the parameters that are trained now."""
        self._sync.build([slot for slot in self._sync.slots if slot.param.requires_grad])

    # -- what coding left out

    @property
    def owed(self) -> list[Tensor]:
        """Piece by piece, as it is now."""
        return [piece.tensor.clone() for piece in self._sync.wire.pieces()]

    @property
    def owed_by_name(self) -> dict[str, Tensor]:
        return {slot.name: c.owed(slot) for c in self._sync.wire.coders for slot in c.bucket.slots}

    def keep(self) -> None:
        """The step is final: what is owed now is what a lost step would come back to."""
        self._sync.wire.keep()

    def put_back(self) -> None:
        self._sync.wire.put_back()

    def rescale(self, factor: float) -> None:
        """Losses are scaled by another number from now on, `factor` times the one before."""
        self._sync.wire.rescale(torch.tensor(factor))


class PushMeeting(Meeting):
    """The same where gradients go to servers, which step; their values may come behind the next forward."""

    def __init__(self, model: nn.Module, links: Sequence[Any], replicas: int = 0) -> None:
        servers = Servers(links, ["h"] * len(links), replicas=replicas)
        super().__init__(
            PushSync([(n, p, False) for n, p in model.named_parameters()], AloneGroup(), servers, 1)
        )

    def apply(self, recipe: Any, params: Sequence[Tensor]) -> Outcome:
        """The step of the only optimizer."""
        return self._sync.apply(0, [(recipe, params)])

    def bring_to_servers(self) -> None:
        """In a new term on the servers, to which this worker brings its parameters."""
        self._sync.rejoin(brings=True)

    def cut_off(self) -> None:
        """No server can be reached any more."""
        for link in self._sync.held.servers.links:
            link.close()

    @property
    def waited_s(self) -> float:
        return self._sync.wait_s

    @property
    def why_not_behind(self) -> str:
        """Why the next step waits for its values; "" where it does not."""
        return self._sync.arrivals.why_not()

    @property
    def num_on_their_way(self) -> int:
        """Pieces in which the last step's values are asked for."""
        return len(self._sync.arrivals._pieces)

    @property
    def order(self) -> list[str]:
        """Of the parameters, as the script needs them."""
        return self._sync.arrivals.order

    @property
    def never_came(self) -> bool:
        return self._sync.arrivals.never is not None

    @property
    def name_at(self) -> dict[int, str]:
        """By the byte at which it begins on its server: the parameter."""
        return {r.offset_bytes: r.tensor.name for r in self._sync.held.placement.ranges}


class PartedMeeting(Meeting):
    """The same for replicas of a stage that keep stretches of its parameters."""

    def __init__(
        self, laid_out: Any, group: Group, device: torch.device, *, keeps: bool, defers: bool
    ) -> None:
        from echelon.parallel.sharded.carry import Carrier
        from echelon.parallel.sharded.parted import PartedSync

        carrier = Carrier(group, AloneGroup(device))
        super().__init__(PartedSync(laid_out, group, carrier, device, keeps=keeps, defers=defers))

    @property
    def lent(self) -> Any:
        """What a stage asks for the parameters that it is about to use."""
        return self._sync

    def step(self) -> AbstractContextManager[None]:
        """Inside, parameters are whole when they are needed."""
        return self._sync.step()

    def watch_units(self) -> list[int]:
        """How many units were whole each time that one was gathered, from now on."""
        seen: list[int] = []
        for unit in self._sync.units:
            gather = unit.gather
            unit.gather = lambda gather=gather: (gather(), seen.append(self.num_whole))
        return seen

    @property
    def num_whole(self) -> int:
        return sum(unit.resident for unit in self._sync.units)

    @property
    def grads(self) -> dict[str, tuple[int, int, Tensor] | None]:
        """By name: the elements of a parameter that are here, and their gradient; None where there is none."""
        return {
            slot.name: None if slot.param.grad is None else (slot.start, slot.stop, slot.param.grad)
            for slot in self._sync.slots
        }

    @property
    def only_parts_are_here(self) -> bool:
        return all(slot.param.data_ptr() == slot.part.data_ptr() for slot in self._sync.slots)


class SplitModel:
    """A model that lies over the ranks of `group`, and what a step of a run asks all of them about its gradients."""

    def __init__(self, params: Sequence[Tensor], lies: Mapping[int, Placed], group: Any = None) -> None:
        """`lies`, by a parameter's id: what of it is here."""
        self.params, self.lies = params, lies
        self._split = Split(dict(lies), group)
        self._machine = SimpleNamespace(
            split=self._split, syncs=[], side_losses=[], strategy=SimpleNamespace(nonfinite="skip")
        )
        self._optimizer = SimpleNamespace(params=lambda: params)

    @property
    def asks_nobody(self) -> bool:
        return self._split.over(self.params) is None

    def clip_norm(self, max_norm: float) -> Tensor:
        """The norm before. PeerLost when a rank is gone."""
        return clip.clip_norm(self.params, max_norm, self._split)

    def clip_norm_of_a_run(self, max_norm: float) -> Tensor:
        """The same as a strategy with clip_norm has it."""
        return away.clip_norm(self._machine, self.params, max_norm)

    def clip_norm_of_a_script(self, max_norm: float) -> Tensor:
        """The same as run.clip_grad_norm has it: a lost peer loses the step and raises nothing."""
        return away.clip_now(self._machine, self.params, max_norm)

    def scaler_found(self, found: dict[str, Tensor]) -> None:
        """What a GradScaler found infinite here is so for all ranks."""
        _found_anywhere(self._machine, found)

    def all_finite(self, here: bool) -> bool:
        """Is it so on all ranks?"""
        return judging.everywhere(self._machine, self._optimizer, here)

    def not_finite(self, here: Iterable[Tensor]) -> list[Tensor]:
        """The parameters that are not so on some rank."""
        return judging._wrong(self._machine, self._optimizer, {id(p) for p in here})

    @property
    def lost_operations(self) -> list[Lost]:
        return self._machine.side_losses
