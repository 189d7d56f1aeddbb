"""What a step is expected to move and a worker to need: the models as they were prepared, put into the pure counts of mesh/moves.py and
mesh/memory.py. Asked once the first step is over: then it is known where a model was cut and what shapes pass through shared layers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from echelon.mesh import allocator, memory, moves
from echelon.mesh.moves import Crossing
from echelon.parallel.allreduce import AllReduceSync
from echelon.parallel.coded import CodedWire
from echelon.parallel.gradsync import GradSync
from echelon.parallel.kept import Graph
from echelon.parallel.pipeline import bubble
from echelon.parallel.pipeline.contract import Port
from echelon.parallel.rounds import LocalSync
from echelon.parallel.sums import SumWire

if TYPE_CHECKING:
    from echelon.piped import Piped
    from echelon.prepared import Prepared


NOTHING = Graph(0, 0)


def step_bytes(prepared: Prepared) -> float | None:
    """What this rank sends in a step (mesh/moves.py). None where sizes do not tell: rows of sparse tables differ from step to step, and
    columns meet where the labels are."""
    sharding, accumulate = prepared.sharding, prepared.strategy.accumulate
    if prepared.tables.sides is not None:
        return None
    meetings = [_meeting(sync, prepared.strategy.local_steps) for sync in _whole(prepared)]
    if None in meetings:
        return None
    found = sum(filter(None, meetings))
    if sharding.level == 1 and sharding.owned is not None:
        found += sharding.split_bytes * moves.factor("broadcast", sharding.owned.group.size)
    elif sharding.syncs:
        found += sharding.step_bytes(accumulate * prepared.strategy.microbatches)
    found += accumulate * sum(map(sharding.staged_bytes, sharding.parted))
    for piped in prepared.piped.values():
        found += accumulate * _crossing(piped) + _tied(piped)
    return found + sum(shared.axis.expected for shared in prepared.shared.values() if shared.axis is not None)


def peak_bytes(prepared: Prepared) -> tuple[int | None, int | None]:
    """The most memory that this worker needs at once, and what of it forwards keep and backwards take beside: None where that could not be
    counted, and it is then not in the first. The first is None where nothing was prepared that trains, and where what a form keeps is not
    counted: what coding owes (compress), values on their way while others step (updates that are not `sync`)."""
    strategy = prepared.strategy
    if prepared.needs is None or strategy.compress != "none" or strategy.update != "sync":
        return None, None
    training, base = prepared.needs
    split = memory.split_of(strategy, prepared.world.size)
    here = sum(
        slot.param.nbytes
        for sync in _whole(prepared)
        if isinstance(sync, AllReduceSync)
        for slot in sync.slots
    )
    if training.parameters and (split.stages > 1 or split.tensor > 1) and split.level < 2:
        split = replace(split, largest_stage=here * split.tensor / training.parameters)
    kept = activation_bytes(prepared)
    need = memory.needed(training, split)
    beside = allocator.kept_beside(need.total + (kept or 0)) if prepared.world.device.type == "cpu" else 0
    return memory.peak(need, base + beside, kept or 0), kept


def activation_bytes(prepared: Prepared) -> int | None:
    """What the first step's forwards kept and their backwards took beside, at the most; None where that could not be seen, and where no backward
    was."""
    found = prepared.graphs.found
    graphs = [graph for graph in found.values() if graph is not None]
    if not graphs or len(graphs) < len(found):
        return None
    plain = found.get(None)
    return (plain.most if plain is not None else 0) + sum(map(_piped_bytes, prepared.piped.values()))


def _piped_bytes(piped: Piped) -> int:
    """Bytes of the micro-batches that are there at once in this worker's order, of the batch, and of messages. Between steps the script
    still holds the batch while the next one is fetched, which is more on a stage that keeps little."""
    graphs = piped.graphs

    def sizes(stage: int, micro: int) -> tuple[int, int, int]:
        label: Hashable = (id(piped.model), stage, micro)
        if (
            label not in graphs.found
        ):  # dealt to this worker after the first step: as the largest that it had in that
            same = [a for a in graphs.found if isinstance(a, tuple) and a[:2] == (id(piped.model), stage)]
            label = max(same, key=lambda a: (graphs.found[a] or NOTHING).kept, default=label)
        found = graphs.found.get(label) or NOTHING
        return found.kept, found.most, graphs.left.get(label, 0)

    order = piped.orders[piped.world.pipe.rank] if piped.orders else ()
    messages = piped.runtime.pool.num_bytes if piped.world.device.type == "cpu" else 0
    return max(bubble.held(order, sizes), piped.batch_bytes) + piped.batch_bytes + messages


def _whole(prepared: Prepared) -> list[GradSync]:
    """The meetings of what is not split by `sharded`."""
    split = {id(sync) for sync in (*prepared.sharding.syncs, *prepared.sharding.parted)}
    return [sync for sync in prepared.machine.syncs if id(sync) not in split]


def _meeting(sync: GradSync, local_steps: int) -> float | None:
    """None for one that is not known here, and for rows."""
    if not isinstance(sync, AllReduceSync):
        return None
    trained = [slot for slot in sync.slots if slot.param.requires_grad]
    if any(slot.sparse for slot in trained):
        return None
    gradients, values = (sum(slot.param.nbytes for slot in of) for of in (trained, sync.slots))
    if isinstance(sync, LocalSync):
        return moves.pushed(values, values) / local_steps
    if not sync.applies_here:
        return moves.pushed(gradients, values)
    if isinstance(sync.wire, CodedWire):
        return float(sum(coder.sent_bytes for coder in sync.wire.coders))
    if isinstance(sync.wire, SumWire):
        return moves.summed(gradients, float(sync.wire.share), sync.group.size)
    return moves.all_reduced(gradients, sync.group.size)


def _crossing(piped: Piped) -> float:
    """The micro-batches of one batch that this worker has, each with its own shapes."""
    if not piped.orders:  # it was not trained in this step
        return 0.0
    rank, places = piped.world.pipe.rank, piped.strategy.stages
    where = [stage % places for stage in range(piped.num_stages)]
    place = piped.world.mesh.stage(piped.world.rank)
    mine = {a.micro for a in piped.orders[rank] if a.kind == "forward"}
    return sum(
        moves.piped(_crossings(port for s in piped.stages.values() for port in (*s.takes(m), *s.gives(m))), where, place, 1)
        for m in mine
    )  # fmt: skip


def _crossings(ports: Iterable[Port]) -> list[Crossing]:
    return [
        Crossing(p.source, p.target, math.prod(p.shape) * p.dtype.itemsize, p.grad)
        for p in dict.fromkeys(ports)
    ]


def _tied(piped: Piped) -> float:
    tied = piped.tied
    return (
        moves.all_reduced(sum(copy.param.nbytes for copy in tied.copies), tied.group.size)
        if tied is not None
        else 0.0
    )
