"""Meetings of the workers that are there, on the server that deals: every worker's bytes to every worker."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from echelon.errors import UsageError
from echelon.ps.service import Request

Answers = list[Callable[[], None]]

At = tuple[int, int]
"""(Group, the meeting's number)."""


class Assembly:
    """All meetings of a run. `live` are the workers that are there; answers are given back, and made by the caller."""

    def __init__(self) -> None:
        self._here: dict[At, dict[int, Request]] = {}
        self._results: dict[At, tuple[list[int], Tensor]] = {}
        """Of meetings whose answers some have, told by them."""

    def come(self, request: Request, live: Collection[int]) -> Answers:
        """A worker comes to a meeting: answered once all have."""
        at = int(request.head["group"]), int(request.head["number"])
        if at in self._results:
            ranks, rows = self._results[at]
            return [lambda: request.answer({"ranks": ranks}, [rows])]
        self._here.setdefault(at, {})[request.peer.rank] = request
        return self._met(at, live)

    def lose(self, rank: int, live: Collection[int]) -> Answers:
        """A worker is gone: nobody waits for it."""
        answers: Answers = []
        for at in list(self._here):
            self._here[at].pop(rank, None)
            answers += self._met(at, live)
        return answers

    def told(self, request: Request) -> Answers:
        """A worker says what its last meeting gave: somebody may have missed the answer."""
        told = request.head["meeting"]
        if not told:
            return []
        at = int(told["group"]), int(told["number"])
        ranks, rows = [int(r) for r in told["ranks"]], request.tensors[0].clone()
        self._results[at] = (ranks, rows)
        met = self._here.pop(at, {})
        return [lambda r=r: r.answer({"ranks": ranks}, [rows]) for r in met.values()]  # type: ignore[misc]

    def _met(self, at: At, live: Collection[int]) -> Answers:
        here = self._here[at]
        if not here or set(live) - here.keys():
            return []
        del self._here[at]
        ranks = sorted(here)
        brought = [here[rank].tensors[0].view(-1) for rank in ranks]
        if len({(x.dtype, x.numel()) for x in brought}) > 1:
            told = ", ".join(f"worker {r} {x.numel()} bytes" for r, x in zip(ranks, brought, strict=True))
            error = UsageError(
                f"the workers are in different calls: {told}", remedy="All workers make the same calls."
            )
            return [lambda r=r: r.refuse(error) for r in here.values()]  # type: ignore[misc]
        rows = torch.stack(brought)
        return [lambda r=r: r.answer({"ranks": ranks}, [rows]) for r in here.values()]  # type: ignore[misc]
