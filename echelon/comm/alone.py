"""The group of one rank: every operation is over when it begins."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.comm import check
from echelon.comm.group import Done, Lost, Op, Outcome, Receipt, Work

LARGE = 1 << 20
"""Buffers from here on take no memory until they are written to: alone, most gradients stay where they are."""


class AloneGroup:
    """A Group of one. `abort` makes it lose like any other, so failures can be tried in one process."""

    rank = 0
    size = 1
    local = True
    sent_bytes = 0.0

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self._outcome: Outcome | None = None

    def buffer(self, nbytes: int) -> Tensor:
        if self.device.type != "cpu" or nbytes < LARGE:
            return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        untouched = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(untouched, dtype=torch.uint8)

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        check.whole("all_reduce", x=x)
        check.reducible("all_reduce", x.dtype, op)
        return Done(self._outcome)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> Work:
        check.whole("reduce_scatter", out=out, x=x)
        check.stacked("reduce_scatter", x, out, 1)
        check.reducible("reduce_scatter", x.dtype, op)
        return self._copied(out, x[0])

    def reduce(self, x: Tensor, root: int = 0, op: Op = "sum") -> Work:
        check.rank("reduce", "root", root, 1)
        check.whole("reduce", x=x)
        check.reducible("reduce", x.dtype, op)
        return Done(self._outcome)

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        check.whole("all_gather", out=out, x=x)
        check.stacked("all_gather", out, x, 1)
        return self._copied(out[0], x)

    def gather(self, out: Tensor | None, x: Tensor, root: int = 0) -> Work:
        check.rank("gather", "root", root, 1)
        check.whole("gather", out=out, x=x)
        check.only_on_root("gather", "out", out, x, True, 1)
        assert out is not None
        return self._copied(out[0], x)

    def scatter(self, out: Tensor, x: Tensor | None, root: int = 0) -> Work:
        check.rank("scatter", "root", root, 1)
        check.whole("scatter", out=out, x=x)
        check.only_on_root("scatter", "x", x, out, True, 1)
        assert x is not None
        return self._copied(out, x[0])

    def all_to_all(self, out: Tensor, x: Tensor, out_counts: Sequence[int], counts: Sequence[int]) -> Work:
        check.whole("all_to_all", out=out, x=x)
        check.cut("all_to_all", "out", out, out_counts, 1)
        check.cut("all_to_all", "x", x, counts, 1)
        check.stacked("all_to_all", out[None], x, 1)
        return self._copied(out, x)

    def broadcast(self, x: Tensor, root: int = 0) -> Work:
        check.rank("broadcast", "root", root, 1)
        check.whole("broadcast", x=x)
        return Done(self._outcome)

    def send(self, x: Tensor, peer: int, tag: int = 0) -> Work:
        check.other("send", peer, 0, 1)
        return Done(self._outcome)

    def recv(self, x: Tensor, peer: int | None, tag: int = 0) -> Receipt:
        check.other("recv", peer, 0, 1)
        return Done(self._outcome)

    def barrier(self) -> Work:
        return Done(self._outcome)

    def abort(self, reason: str) -> None:
        self._outcome = Lost((), reason)

    def close(self) -> None:
        pass

    def _copied(self, to: Tensor, source: Tensor) -> Work:
        if self._outcome is None:
            to.copy_(source)
        return Done(self._outcome)
