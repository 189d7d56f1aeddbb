"""What becomes of everything that was prepared when a model is cut into stages: a rank forgets what was of the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from echelon.clock import Deadline
from echelon.comm.group import Lost
from echelon.errors import PeerLost
from echelon.parallel.allreduce import AllReduceSync
from echelon.parallel.average import Average
from echelon.parallel.gradsync import GradSync
from echelon.parallel.pipeline.lending import WHOLE, Lending, Uses
from echelon.parallel.sharded.parted import PartedSync
from echelon.parallel.tensor import meet
from echelon.piped import Around
from echelon.prepare import model as models

if TYPE_CHECKING:
    from echelon.prepared import Prepared

ALIKE_S = 1800.0


def around(prepared: Prepared, params: Sequence[tuple[str, nn.Parameter, bool]]) -> Around:
    """What a pipeline asks once it is known where the model with these parameters is cut."""

    def here(tensor: Tensor) -> bool:
        placed = prepared.placed.get(id(tensor))
        return placed is None or bool(placed.runs)

    def staged(model: nn.Module, uses: Uses) -> tuple[GradSync, Lending]:
        if id(model) in prepared.later:
            prepared.later.pop(id(model)).make(here)
        mine = [entry for entry in params if here(entry[1])]
        index = prepared.models.index(model)
        for name, buffer in models.unwrapped(model).named_buffers():
            full = f"model{index}/" * (index > 0) + models.plain_name(name)
            prepared.placed_buffers[full] = prepared.placed.pop(id(buffer))
        for optimizer in prepared.machine.optimizers:
            state = optimizer.optimizer.state
            for param in [p for p in state if isinstance(p, Tensor) and not here(p)]:
                del state[param]
        average = prepared.averages.get(id(model))
        if average is not None:
            average.drop([p for p in average.live if not here(p)])
        parted = prepared.sharding.staged(model, mine, uses)
        if parted is not None:
            _narrow(prepared, parted, average)
            prepared.register(parted, set(parted.by_param))
            prepared.say(prepared.sharding.staged_lines(parted))
            return cast(GradSync, parted), parted
        sync: AllReduceSync = prepared.add_sync(mine)
        prepared.sharding.own(mine, sync.group, sync.wire.traffic)
        return sync, WHOLE

    @contextlib.contextmanager
    def by_itself() -> Iterator[None]:
        with prepared.norms.by_itself(), meet.by_itself():
            yield

    def alike(pieces: int) -> int:
        """Replicas that keep parts of one stage bring them for each micro-batch: all have as many as the one with the fewest."""
        if not prepared.sharding.splits:
            return pieces
        side = prepared.world.side
        told = torch.tensor([float(pieces)], device=prepared.world.device)
        outcome = side.all_reduce(told, "min").wait(Deadline.after(ALIKE_S))
        if isinstance(outcome, Lost):
            raise PeerLost(f"a peer was lost before a step: {outcome.reason}", peers=outcome.peers)
        return int(told.item())

    return Around(
        prepared.placed, staged, prepared.sharding.kept, alike, by_itself, lambda lines: prepared.say(lines)
    )


def _narrow(prepared: Prepared, parted: PartedSync, average: Average | None) -> None:
    """Optimizers' state and averages of parameters of which a rank keeps a stretch."""
    for optimizer in prepared.machine.optimizers:
        for param, state in optimizer.optimizer.state.items():
            slot = parted.by_param.get(id(param))
            for key, value in state.items() if slot is not None else ():
                if slot is not None and isinstance(value, Tensor) and tuple(value.shape) == slot.shape != ():
                    state[key] = value.reshape(-1)[slot.start : slot.stop].clone()
    if average is not None:
        average.narrow({id(slot.param): (slot.start, slot.stop) for slot in parted.slots})
