"""What all workers of a step get at once, written by the server straight to where each of them waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.errors import UsageError, WireError
from echelon.native import spread
from echelon.ps.service import Request


def add_up(requests: list[Request]) -> None:
    """Answers all of them with the sum of what they brought: of one piece of a bucket over all workers (apply=worker), in the
    order of ranks. A request that cannot be answered in its worker's own memory shares one sum with the others of that kind."""
    parts = [request.tensors[0] for request in requests]
    if len({(part.dtype, part.numel()) for part in parts}) > 1:
        told = ", ".join(
            f"worker {request.peer.rank} {part.numel()} of {part.dtype}"
            for request, part in zip(requests, parts, strict=True)
        )
        raise UsageError(f"the workers' parts of one sum differ: {told}")
    here = [request for request in requests if request.peer.local]
    memories = rooms(here, parts[0].nbytes)
    outs = {id(one): room.view(parts[0].dtype) for one, room in zip(here, memories, strict=False)}
    total = torch.empty_like(parts[0]) if len(outs) < len(requests) else None
    _sum([*outs.values(), *([total] if total is not None else [])], parts)
    for request in requests:
        out = outs.get(id(request), total)
        assert out is not None
        request.answer({}, [out], None if request.peer.local else _keep(out))


def rooms(requests: Sequence[Request], num_bytes: int) -> list[Tensor]:
    """Memory for each one's answer of so many bytes, its worker's own where that is shared; none at all if one of them has no such
    room: answer() then copies, or says what is wrong."""
    try:
        if all(request.room_bytes == [num_bytes] for request in requests):
            return [request.room()[0] for request in requests]
    except WireError:  # the worker is gone, and its memory with it
        pass
    return []


def _sum(outs: list[Tensor], parts: list[Tensor]) -> None:
    if parts[0].dtype in spread.CODES and all(part.is_contiguous() for part in parts):
        spread.add(outs, parts)
        return
    total = parts[0].clone()  # such as complex numbers
    for part in parts[1:]:
        total.add_(part)
    for out in outs:
        out.copy_(total.view(-1).view(out.shape))


def _keep(*tensors: Tensor) -> Callable[[], Any]:
    """Holds tensors until it is called and let go of."""
    return lambda: tensors and None
