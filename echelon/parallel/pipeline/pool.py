"""Memory for messages, used again as soon as nobody else refers to it.

A received value is handed to a stage in the memory it came in. How long that stays in use cannot be told from outside: autograd
keeps what backward needs, and a parameter's `.grad` may become a view of a gradient that came. So the pool asks the memory itself
how many tensors lie in it.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Pool:
    """Flat uint8 tensors on the host, by size. Not for several threads."""

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self._all: dict[int, list[Tensor]] = {}
        self._asked: set[int] = set()

    def take(self, num_bytes: int) -> Tensor:
        """A tensor of this size; it is taken for as long as it, or anything that shares its memory, is referred to."""
        self._asked.add(num_bytes)
        same = self._all.setdefault(num_bytes, [])
        for buffer in same:
            if _num_users(buffer) == _AT_REST:
                return buffer[:]
        same.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.pinned))
        return same[-1][:]

    def trim(self) -> None:
        """Forgets the sizes that nobody asked for since the last trim: shapes may change from step to step."""
        self._all = {size: same for size, same in self._all.items() if size in self._asked}
        self._asked = set()

    def forget(self) -> None:
        """Forgets everything: somebody may still write there."""
        self._all, self._asked = {}, set()

    @property
    def tensors(self) -> list[Tensor]:
        return [buffer for same in self._all.values() for buffer in same]

    @property
    def num_bytes(self) -> int:
        return sum(size * len(same) for size, same in self._all.items())


def _num_users(buffer: Tensor) -> int:
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)  # type: ignore[attr-defined]


_AT_REST = _num_users(torch.empty(1, dtype=torch.uint8))
