"""The sum of one piece of a bucket over all workers (apply=worker), in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from echelon.errors import UsageError
from echelon.ps.service import Request


def add_up(requests: list[Request]) -> None:
    """Answers all of them with the sum of what they brought."""
    parts = [request.tensors[0] for request in requests]
    if len({(part.dtype, part.numel()) for part in parts}) > 1:
        told = ", ".join(
            f"worker {request.peer.rank} {part.numel()} of {part.dtype}"
            for request, part in zip(requests, parts, strict=True)
        )
        raise UsageError(f"the workers' parts of one sum differ: {told}")
    total = torch.empty_like(parts[0])
    torch.add(parts[0], parts[1], out=total) if len(parts) > 1 else total.copy_(parts[0])
    for part in parts[2:]:
        total.add_(part)
    for request in requests:
        request.answer({}, [total], None if request.peer.local else _keep(total))


def _keep(*tensors: Tensor) -> Callable[[], Any]:
    """Holds tensors until it is called and let go of."""
    return lambda: tensors and None
