"""A Group whose ranks are threads of one process: for tests of everything above it, without a launch.

Sums are taken in rank order by the last thread to arrive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from echelon.clock import Deadline
from echelon.comm.group import Lost, Met, Op, Outcome, Work

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda a, b: a + b,
    "max": torch.maximum,
    "min": torch.minimum,
}


class Room:
    """Where `size` thread ranks meet. Operations are matched by their number, so several may be in flight."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.open: dict[int, dict[int, tuple[str, Tensor, Callable[[list[Tensor]], None]]]] = {}
        self.over: set[int] = set()
        self.lost: Lost | None = None

    def groups(self) -> list[ThreadGroup]:
        return [ThreadGroup(self, rank) for rank in range(self.size)]

    def enter(
        self, number: int, rank: int, what: str, x: Tensor, act: Callable[[list[Tensor]], None]
    ) -> None:
        with self.changed:
            if self.lost:
                return
            slot = self.open.setdefault(number, {})
            slot[rank] = (what, x, act)
            if len(slot) < self.size:
                return
            kinds = {entry[0] for entry in slot.values()}
            if len(kinds) > 1:
                self.fail(
                    "ranks called different operations: "
                    + "; ".join(f"rank {r}: {slot[r][0]}" for r in sorted(slot))
                )
                return
            tensors = [slot[r][1] for r in range(self.size)]
            copies = [t.clone() for t in tensors]
            for r in range(self.size):
                slot[r][2](copies)
            del self.open[number]
            self.over.add(number)
            self.changed.notify_all()

    def fail(self, reason: str, peers: tuple[int, ...] = ()) -> None:
        with self.changed:
            self.lost = self.lost or Lost(peers, reason)
            self.changed.notify_all()

    def wait(self, number: int, deadline: Deadline) -> Outcome:
        with self.changed:
            while number not in self.over:
                if self.lost:
                    return self.lost
                if not self.changed.wait(deadline.left_s) and deadline.passed:
                    missing = tuple(r for r in range(self.size) if r not in self.open.get(number, {}))
                    self.lost = Lost(missing, f"ranks {list(missing)} did not come before the deadline")
                    self.changed.notify_all()
                    return self.lost
            return Met()


class ThreadWork:
    def __init__(self, room: Room, number: int) -> None:
        self.room, self.number = room, number

    def wait(self, deadline: Deadline) -> Outcome:
        return self.room.wait(self.number, deadline)


class ThreadGroup:
    """One thread's end of a Room."""

    local = False

    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.rank, self.size, self._next = room, rank, room.size, 0

    def _enter(self, what: str, x: Tensor, act: Callable[[list[Tensor]], None]) -> Work:
        number, self._next = self._next, self._next + 1
        self.room.enter(number, self.rank, f"{what} {tuple(x.shape)} {x.dtype}", x, act)
        return ThreadWork(self.room, number)

    def buffer(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        def act(parts: list[Tensor]) -> None:
            total = parts[0].clone()
            for part in parts[1:]:
                total = _COMBINE[op](total, part)
            x.copy_(total)

        return self._enter(f"all_reduce {op}", x, act)

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        def act(parts: list[Tensor]) -> None:
            for rank, part in enumerate(parts):
                out[rank].copy_(part)

        return self._enter("all_gather", x, act)

    def broadcast(self, x: Tensor, root: int = 0) -> Work:
        def act(parts: list[Tensor]) -> None:
            x.copy_(parts[root])

        return self._enter(f"broadcast from {root}", x, act)

    def barrier(self) -> Work:
        return self._enter("barrier", torch.zeros(0), lambda parts: None)

    def abort(self, reason: str) -> None:
        self.room.fail(reason, (self.rank,))

    def close(self) -> None:
        pass
