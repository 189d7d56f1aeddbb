"""A state as 16 hexadecimal digits: two are equal only if every bit, type, shape and name is."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def fingerprint(state: Any) -> str:
    """Of tensors, numbers, strings and None in any nesting; the order of a dict's keys does not count."""
    digest = hashlib.sha256()
    _add(digest, state)
    return digest.hexdigest()[:16]


def _add(digest: Any, x: Any) -> None:
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu().contiguous()
        digest.update(f"tensor {x.dtype} {tuple(x.shape)} ".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b"")
    elif isinstance(x, dict):
        digest.update(f"dict {len(x)} ".encode())
        for key in sorted(x, key=repr):
            _add(digest, key)
            _add(digest, x[key])
    elif isinstance(x, list | tuple):
        digest.update(f"list {len(x)} ".encode())
        for one in x:
            _add(digest, one)
    else:
        digest.update(f"{type(x).__name__} {x!r} ".encode())
