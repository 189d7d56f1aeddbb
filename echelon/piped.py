"""A model as a pipeline: how run.step reaches it, and what becomes of a model that is called outside of run.step.

Where the model is cut is known once its first inputs are: then each rank keeps its stage (placing.py) and lets its gradients
meet with those that have the same. Until then every rank holds all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from echelon import activity, build
from echelon.build import World
from echelon.clock import Deadline
from echelon.comm.alone import AloneGroup
from echelon.comm.group import Lost, Met, Outcome
from echelon.data import tree
from echelon.errors import LoopError, PeerLost
from echelon.mesh.layout import Placed
from echelon.parallel.gradsync import GradSync, Share
from echelon.parallel.kept import Backwards
from echelon.parallel.norm import NormSync, Within
from echelon.parallel.pipeline import cut, measure, plan, rows, sharing
from echelon.parallel.pipeline.contract import Action, Before, MicroBatch
from echelon.parallel.pipeline.dealer import Dealer
from echelon.parallel.pipeline.lending import WHOLE, Lending, Uses
from echelon.parallel.pipeline.moments import Moments
from echelon.parallel.pipeline.placing import Seat, keep
from echelon.parallel.pipeline.record import Record, Value, swap
from echelon.parallel.pipeline.runtime import Ran, Runtime
from echelon.parallel.pipeline.schedule import Orders
from echelon.parallel.pipeline.stage import ModelStage
from echelon.parallel.pipeline.tied import Copy, Tied
from echelon.parallel.pipeline.trace import Records
from echelon.prepare.model import Override
from echelon.step import Machine
from echelon.strategy import Strategy

STEP_S = 1800.0
MEASURE_S = 2.0
"""For so long rank 0 measures the model's parts before it is cut."""

LossFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Around:
    """What a pipeline asks of whoever prepares the model."""

    placed: dict[int, Placed]
    """Is told how every tensor lies here."""

    staged: Callable[[nn.Module, Uses], tuple[GradSync, Lending]]
    """Called once the other stages' parameters are gone: lets the gradients of the rest meet, says who brings them when they are used, and
    forgets what else was of the others."""

    kept: Callable[[int], int]
    """Of so many elements of a parameter, how many a worker keeps that has its stage."""

    norms: NormSync
    """What the model's BatchNorms ask."""

    by_itself: Callable[[], AbstractContextManager[None]]
    """Inside, layers that would ask other ranks (BatchNorm) do not."""

    say: Callable[[list[str]], None]
    """Lines for people."""

    graphs: Backwards
    """Where the first step's backwards are looked at."""


class Piped:
    """One model. Every rank calls the same in the same order."""

    def __init__(
        self, model: nn.Module, strategy: Strategy, world: World, machine: Machine, around: Around
    ) -> None:
        self.model, self.strategy, self.world, self.machine, self.around = (
            model, strategy, world, machine, around,
        )  # fmt: skip
        self.chunks = strategy.chunks if strategy.schedule == "interleaved" else 1
        self.num_stages = strategy.stages * self.chunks
        self.runtime = Runtime(world.pipe, world.device)
        self.records = Records(model, self._whole_forward)
        self.stages: dict[int, ModelStage] = {}
        self.made: cut.Cut | None = None
        self.outline: cut.Outline | None = None
        """What was cut."""
        self.sync: GradSync | None = None
        self.lent: Lending = WHOLE
        self.tied: Tied | None = None
        self.moments: Moments | None = None
        self.slices = build.cut(strategy, world).slices
        self.ran: Ran | None = None
        """What the last step took here."""
        self.loss_dtype = torch.float32
        self.calls = 0
        self.orders: Orders = ()
        """Of the last step."""
        self.dealer = Dealer(strategy.schedule, strategy.widths, self.chunks, strategy.speeds)
        machine.keepers.append(self.dealer)
        self._inner: Callable[..., Any] | None = None
        self.graphs = around.graphs
        self.batch: list[Tensor] = []
        """Of the step that is looked at. Every worker of a pipe has all of it, whatever its stages use."""
        self.batch_bytes = 0
        self.graphs.leave_out(lambda: (*self.batch, *self.runtime.pool.tensors))
        Override(model, "forward", self._forward)

    # -- outside of run.step --------------------------------------------------------------------------------------

    def _forward(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        self._inner = inner

        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                raise LoopError(
                    "under pipeline a model lies in stages on several workers, and the script called it in a loop of its own",
                    remedy="Write loss = run.step(loss_fn, (inputs, target)): it does forward, backward, step and zero_grad, "
                    "under every strategy. With torch.no_grad() the model can be called as it is.",
                )
            return self.infer(args, kwargs)

        return forward

    def _whole_forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self._inner is not None
        return self._inner(*args, **kwargs)

    @torch.no_grad()
    def infer(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model's output on all ranks of the pipe; the first worker of each stage computes."""
        micro = MicroBatch(args, kwargs, None, 1.0)
        self.ready(micro)
        found: list[Any] = []

        def catch(output: Any, target: Any) -> Tensor:
            found.append(output)
            return torch.zeros(())

        first = self._firsts()
        orders = tuple(
            tuple(Action("forward", s, 0) for s in range(self.num_stages) if first[s] == rank)
            for rank in range(self.world.pipe.size)
        )
        for stage in self.stages.values():
            stage.begin([micro], catch)
        with self.lent.step():
            self._through(orders, [self.machine.share])
        for stage in self.stages.values():
            stage.drop()
        record = self.records.of(args, kwargs)
        return self._everywhere(record, found[0] if found else None, first[self.num_stages - 1])

    def _everywhere(self, record: Record, output: Any, root: int) -> Any:
        """What the last stage made, on every rank of the pipe."""
        if output is None:

            def room(value: Value) -> Tensor:
                meta = record.values[value.number]
                return torch.empty(meta.shape, dtype=meta.dtype, device=self.world.device)

            output = swap(room, record.output, Value)
        else:
            output = tree.map_tree(lambda t: t.detach().contiguous(), output)
        for tensor in tree.tensors(output):
            self._met(self.world.pipe.broadcast(tensor, root).wait(Deadline.after(STEP_S)))
        return output

    # -- a step ---------------------------------------------------------------------------------------------------

    def step(self, loss_fn: LossFn, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Tensor:
        """Forward and backward of this worker's part of a batch; gives its loss, on all ranks of the pipe: in float64, and `loss_dtype`
        is what the script's has. Of a lost step it is any number."""
        micros = self._micros(args, kwargs, target)
        self.ready(micros[0], loss_fn)
        assert self.sync is not None
        self.batch = tree.tensors((args, kwargs, target)) if self.graphs.looks else []
        self.batch_bytes = max(self.batch_bytes, sum(t.nbytes for t in self.batch))
        for stage in self.stages.values():
            stage.begin(micros, loss_fn)
        share = self.machine.share
        self.orders = orders = self.dealer.orders(len(micros))
        mine = orders[self.world.pipe.rank]
        early = mine[-1] if self.overlaps else None
        all_count = share.counts and all(m.counts for m in micros)
        apart = [
            replace(share, last=False, sums_to_one=False, counts=share.counts and m.counts, unseen=all_count)
            for m in micros
        ]
        last = replace(share, sums_to_one=len(micros) == 1 and self.overlaps)
        if early is not None:
            last = replace(last, counts=apart[early.micro].counts)
        self._share = None

        def before(action: Action) -> None:
            if self.graphs.looks:
                self._look(action)
            if action.kind != "forward":
                self._begin(last if action == early else apart[action.micro])

        with self.lent.step():
            ran = self._through(orders, apart, before)
        self.batch = []
        self.sync.activity += 1  # a stage may have nothing to train, and was trained on
        if isinstance(ran, Ran):
            self.ran = ran
            times = self.machine.counters.times
            times.forward_s += ran.spent("forward")
            times.backward_s += ran.spent("backward") + ran.spent("weights")
            times.pipe_s += ran.waited_s
        self._begin(last)
        if share.last:
            self.sync.finish()
            if self.tied is not None:
                self._note(self.tied.meet(Deadline.after(STEP_S)))
        return self._loss(micros)

    def _look(self, action: Action) -> None:
        """In the first step it is counted what each micro-batch keeps."""
        label = self.graphs.label = id(self.model), action.stage, action.micro
        if action.kind == "weights":
            self.graphs.left[label] = self.stages[action.stage].put_off_bytes(action.micro)

    @property
    def overlaps(self) -> bool:
        """Gradients leave during the last backward: not where others of this rank come later, or another rank has the last."""
        return self.strategy.schedule in ("1f1b", "gpipe") and not self.strategy.wide

    def _begin(self, share: Share) -> None:
        if self._share is not share:
            self._share = share
            assert self.sync is not None
            self.sync.begin(share)

    _share: Share | None = None

    def _loss(self, micros: Sequence[MicroBatch]) -> Tensor:
        """The sum of the micro-batches' losses by their weights: whoever has some of the last stage adds them. With it goes
        what a micro-batch took on each worker."""
        last = self.stages.get(self.num_stages - 1)
        losses = last.losses if last is not None else {}
        pipe, kinds = self.world.pipe, len(_DTYPES)
        told = torch.zeros(1 + kinds + pipe.size, dtype=torch.float64, device=self.world.device)
        for micro, loss in sorted(losses.items()):
            told[1 + _DTYPES.index(loss.dtype)] += 1
            if micros[micro].counts:
                told[0] += loss.double() * micros[micro].weight
        told[1 + kinds + pipe.rank] = (self.ran and self.ran.per_micro) or 0.0
        outcome = pipe.all_reduce(told).wait(Deadline.after(STEP_S))
        self._note(outcome)
        if isinstance(outcome, Met):
            self.dealer.learn(len(micros), told[1 + kinds :].tolist())
            self.loss_dtype = _DTYPES[int(told[1 : 1 + kinds].argmax())]
        return told[0]

    def _micros(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> list[MicroBatch]:
        """The part cut into micro-batches: this worker's rows of each slice of the global batch, so that replicas have as many, and
        what belongs together at the same time. Where the script made other rows of it, and of streams: in equal pieces."""
        n, pieces = rows.count(args, kwargs, target), self.strategy.microbatches
        loop = self.machine.current
        part = loop.part if loop is not None else None
        sizes = self.slices(part.micro) if part is not None else []
        if part is None or (sum(sizes) != n and part.count):
            some = min(pieces, n) if self.world.side.local else len(sizes) or pieces
            sizes = rows.even(n, max(1, some))
        return rows.cut((args, kwargs, target), n, sizes, self.strategy.loss == "mean")

    @activity.named("the pipeline")
    def _through(self, orders: Orders, shares: Sequence[Share], before: Before | None = None) -> Ran | Lost:
        """All actions. `shares` of the micro-batches: what they count for in BatchNorm's moments."""
        self.calls += 1
        assert self.moments is not None
        self.moments.forget()
        notes = [Within(share, partial(self.moments.note, micro)) for micro, share in enumerate(shares)]

        def begin(action: Action) -> None:
            self.around.norms.within = notes[action.micro]
            if before is not None:
                before(action)

        deadline = Deadline.after(STEP_S)
        try:
            ran = self.runtime.run(orders, self.stages, self.calls, deadline, begin)
        finally:
            self.around.norms.within = None
        if isinstance(ran, Lost):
            self._note(ran)
        self._note(self.moments.settle(deadline))
        return ran

    def _note(self, outcome: Outcome) -> None:
        """A loss is found at the script's step."""
        if isinstance(outcome, Lost):
            self.machine.side_losses.append(outcome)

    def _met(self, outcome: Outcome) -> None:
        if isinstance(outcome, Lost):
            raise PeerLost(f"a peer was lost in the pipeline: {outcome.reason}", peers=outcome.peers)

    # -- the cut --------------------------------------------------------------------------------------------------

    @activity.named("cutting the model")
    def ready(self, micro: MicroBatch, loss_fn: LossFn | None = None) -> None:
        """Cuts the model, the first time."""
        if self.made is not None:
            return
        record = self.records.of(micro.args, micro.kwargs)
        costs = self._costs(record, micro, loss_fn)
        outline = plan.outline(record, costs[:-1], costs[-1])
        sharing.check(self.model, record, self.around.placed)
        if self.strategy.cut:
            made = cut.by_names(outline, self.strategy.cut, self.num_stages)
        else:
            speeds = tuple(float(width) for width in self.strategy.widths) * self.chunks
            made = cut.find(outline, cut.Wish(self.num_stages, speeds))
        plans = plan.Plans(self.model, self.records, record, made)
        mesh, rank = self.world.mesh, self.world.rank
        mine = frozenset(s for s in range(self.num_stages) if s % self.strategy.stages == mesh.stage(rank))
        holders = {
            s: [r for r in range(mesh.size) if mesh.stage(r) == s % self.strategy.stages]
            for s in range(self.num_stages)
        }
        counts = not mesh.widths or mesh.replicas(rank)[0] == rank
        users = {name: made.holders(name) for name in made.owners}
        keep(self.model, users, Seat(mine, holders, counts), self.around.placed)
        first = plans.of(micro)
        self.made, self.outline = made, outline
        shared = self._shared(made)
        sizes = {name: p.numel() for name, p in self.model.named_parameters() if name in shared}
        uses = Uses({s: first[s].names_of_calls for s in sorted(mine)}, frozenset(shared))
        self.sync, self.lent = self.around.staged(self.model, uses)
        defer = self.strategy.schedule == "zero-bubble"
        self.stages = {s: ModelStage(self.model, plans, s, defer=defer, lent=self.lent) for s in sorted(mine)}
        self.sync.begin(self.machine.share)
        self.tied = self._tied(shared, sizes)
        device = self.world.device
        self.moments = Moments(
            self.model, self.world.gradients if mesh.widths else AloneGroup(device), device
        )
        self.around.say([f"pipeline of {self.num_stages} stages: {made.reason}"])

    def _costs(self, record: Record, micro: MicroBatch, loss_fn: LossFn | None) -> list[int]:
        """Nanoseconds of each node and of the loss, measured by rank 0 and told to all: they must cut alike."""
        told = torch.zeros(len(record.nodes) + 1, dtype=torch.int64, device=self.world.device)
        if self.world.rank == 0 and not self.strategy.cut:
            loss = (loss_fn, micro.target) if loss_fn is not None else None
            with self.around.by_itself():
                found = measure.measure(
                    self.model, record, micro.args, micro.kwargs, Deadline.after(MEASURE_S), loss
                )
            told.copy_(torch.tensor([*found.nodes, found.loss]))
        self._met(self.world.everyone.broadcast(told).wait(Deadline.after(STEP_S)))
        costs: list[int] = told.tolist()
        return costs

    def _shared(self, made: cut.Cut) -> dict[str, set[int]]:
        """Parameters that stages of different workers use, and the places of those."""
        names = dict(self.model.named_parameters())
        shared = {}
        for name, stages in made.shared.items():
            places = {s % self.strategy.stages for s in stages}
            if name in names and len(places) > 1:
                shared[name] = places
        return shared

    def _tied(self, shared: Mapping[str, set[int]], numel: Mapping[str, int]) -> Tied | None:
        mesh, rank = self.world.mesh, self.world.rank
        places = set().union(*shared.values())
        ranks = [r for r in mesh.pipe(rank) if mesh.stage(r) in places]
        if rank not in ranks:
            return None
        names = dict(self.model.named_parameters())
        group = self.world.groups.make("tied", ranks)
        copies = [
            Copy(names[name], mesh.stage(rank) in shared[name], self.around.kept(numel[name]))
            for name in sorted(shared)
        ]
        return Tied(copies, group, adds=not mesh.widths or mesh.replicas(rank)[0] == rank)

    def _firsts(self) -> dict[int, int]:
        """Stage -> the first rank of the pipe that has it."""
        mesh = self.world.mesh
        places = [mesh.stage(r) for r in mesh.pipe(self.world.rank)]
        return {s: places.index(s % self.strategy.stages) for s in range(self.num_stages)}


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
