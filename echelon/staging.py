"""What becomes of everything that was prepared when a model is split over the tensor axis or cut into stages: a rank forgets what was
of the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from echelon.parallel.allreduce import AllReduceSync
from echelon.parallel.average import Average
from echelon.parallel.gradsync import GradSync
from echelon.parallel.pipeline.lending import WHOLE, Lending, Uses
from echelon.parallel.sharded.parted import PartedSync
from echelon.parallel.tensor import form as tensors
from echelon.parallel.tensor import meet
from echelon.piped import Around
from echelon.prepare import model as models

if TYPE_CHECKING:
    from echelon.prepared import Prepared


def around(prepared: Prepared, params: Sequence[tuple[str, nn.Parameter, bool]]) -> Around:
    """What a pipeline asks once it is known where the model with these parameters is cut."""

    def here(tensor: Tensor) -> bool:
        placed = prepared.placed.get(id(tensor))
        return placed is None or bool(placed.runs)

    def staged(model: nn.Module, uses: Uses) -> tuple[GradSync, Lending]:
        if id(model) in prepared.later:
            prepared.make(model, here)
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

    return Around(
        prepared.placed,
        staged,
        prepared.sharding.kept,
        prepared.norms,
        by_itself,
        lambda lines: prepared.say(lines),
        prepared.graphs,
    )


def share(prepared: Prepared, model: nn.Module) -> None:
    """Over the tensor axis: parameters become this rank's pieces."""
    strategy, world, user = prepared.strategy, prepared.world, models.unwrapped(model)
    shared = tensors.share(
        user,
        world.tensor,
        world.everyone,
        prepared.norms.lost,
        strategy.tensor_plan,
        strategy.tensor_padding,
        staged=strategy.stages > 1,
        reads=world.reads,
    )
    prepared.shared[id(model)] = shared
    for key, placed in tensors.placed(shared, model.parameters(), world.mesh, world.rank).items():
        prepared.placed.setdefault(key, placed)  # a part of another model may be split already
    prefix = f"model{len(prepared.models)}/" if prepared.models else ""
    for name, placed in tensors.placed_buffers(shared, world.mesh, world.rank).items():
        prepared.placed_buffers[prefix + models.plain_name(name)] = placed
        if strategy.stages > 1:  # whoever keeps a stage asks by the buffer itself
            prepared.placed[id(user.get_buffer(name))] = placed


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
