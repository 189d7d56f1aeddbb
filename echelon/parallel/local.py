"""The part of a tensor that is here."""

from __future__ import annotations

import torch
from torch import Tensor


def is_split(x: Tensor) -> bool:
    """A DTensor. Known by its name, so that nothing of torch.distributed is imported for it."""
    return type(x).__name__ == "DTensor"


def local(x: Tensor) -> Tensor:
    """A DTensor's own memory; any other tensor itself."""
    return x.to_local() if is_split(x) else x  # type: ignore[attr-defined,no-any-return]


def full(x: Tensor) -> Tensor:
    """All of it on every rank: all that hold parts call this. For tests and small tensors."""
    with torch.no_grad():
        return x.full_tensor() if is_split(x) else x  # type: ignore[attr-defined,no-any-return]
