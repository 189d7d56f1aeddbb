"""A Group whose ranks are threads of one process: for tests of everything above it, without a launch.

Reductions are taken in rank order by the last thread to arrive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from echelon.clock import Deadline
from echelon.comm import check, plain
from echelon.comm.group import Lost, Met, Op, Outcome, Receipt, Work
from echelon.mesh import moves

Act = Callable[[list[list[Tensor]]], None]
"""Takes from what every rank brought, by rank, what this one gets."""


@dataclass
class Letter:
    """A send or a recv that waits for its other end. `peer` None: from anybody."""

    work: ThreadWork
    rank: int
    peer: int | None
    tag: int
    x: Tensor

    def __str__(self) -> str:
        return f"{tuple(self.x.shape)} {self.x.dtype}"


class Room:
    """Where `size` thread ranks meet. Operations are matched by their number, so several may be in flight."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.open: dict[int, dict[int, tuple[str, list[Tensor], Act]]] = {}
        self.sent: list[Letter] = []
        self.wanted: list[Letter] = []
        self.over: set[object] = set()
        self.lost: Lost | None = None

    def groups(self) -> list[ThreadGroup]:
        return [ThreadGroup(self, rank) for rank in range(self.size)]

    def enter(self, number: int, rank: int, what: str, brought: list[Tensor], act: Act) -> None:
        with self.changed:
            if self.lost:
                return
            slot = self.open.setdefault(number, {})
            slot[rank] = (what, brought, act)
            if len(slot) < self.size:
                return
            kinds = {entry[0] for entry in slot.values()}
            if len(kinds) > 1:
                self.fail(
                    "ranks called different operations: "
                    + "; ".join(f"rank {r}: {slot[r][0]}" for r in sorted(slot))
                )
                return
            copies = [[x.clone() for x in slot[r][1]] for r in range(self.size)]
            for r in range(self.size):
                slot[r][2](copies)
            del self.open[number]
            if not self.lost:
                self.over.add(number)
            self.changed.notify_all()

    def post(self, letter: Letter, sends: bool) -> None:
        """Delivers the letter if its other end is there; else it waits, in order."""
        with self.changed:
            if self.lost:
                return
            waiting = self.wanted if sends else self.sent
            for other in waiting:
                sent, wanted = (letter, other) if sends else (other, letter)
                if wanted.rank == sent.peer and wanted.tag == sent.tag and wanted.peer in (None, sent.rank):
                    waiting.remove(other)
                    self._deliver(sent, wanted)
                    return
            (self.sent if sends else self.wanted).append(letter)

    def _deliver(self, sent: Letter, wanted: Letter) -> None:
        if str(sent) != str(wanted):
            self.fail(
                f"rank {sent.rank} sent {sent} with tag {sent.tag}, rank {wanted.rank} wants to receive {wanted}"
            )
            return
        wanted.x.copy_(sent.x)
        wanted.work.source = sent.rank
        self.over |= {sent.work.number, wanted.work.number}
        self.changed.notify_all()

    def fail(self, reason: str, peers: tuple[int, ...] = ()) -> None:
        with self.changed:
            self.lost = self.lost or Lost(peers, reason)
            self.changed.notify_all()

    def wait(self, number: object, deadline: Deadline) -> Outcome:
        with self.changed:
            while number not in self.over:
                if self.lost:
                    return self.lost
                if not self.changed.wait(deadline.left_s) and deadline.passed:
                    missing = self._missing(number)
                    self.lost = Lost(missing, f"ranks {list(missing)} did not come before the deadline")
                    self.changed.notify_all()
                    return self.lost
            return Met()

    def _missing(self, number: object) -> tuple[int, ...]:
        if isinstance(number, int):
            return tuple(r for r in range(self.size) if r not in self.open.get(number, {}))
        return tuple(
            {t.peer for t in self.sent + self.wanted if t.work.number is number and t.peer is not None}
        )


class ThreadWork:
    source: int | None = None

    def __init__(self, room: Room, number: object) -> None:
        self.room, self.number = room, number

    def wait(self, deadline: Deadline) -> Outcome:
        return self.room.wait(self.number, deadline)


class ThreadGroup:
    """One thread's end of a Room."""

    local = False

    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.rank, self.size, self._next = room, rank, room.size, 0
        self.sent_bytes = 0.0

    def _enter(self, what: str, x: Tensor, brought: list[Tensor], act: Act) -> Work:
        verb = _VERBS.get(what.split()[0])
        self.sent_bytes += x.nbytes * moves.factor(verb, self.size) if verb is not None else 0.0
        number, self._next = self._next, self._next + 1
        self.room.enter(number, self.rank, f"{what} {tuple(x.shape)} {x.dtype}", brought, act)
        return ThreadWork(self.room, number)

    def buffer(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        check.whole("all_reduce", x=x)
        check.reducible("all_reduce", x.dtype, op)
        return self._enter(
            f"all_reduce {op}", x, [x], lambda parts: _into(x, plain.reduced([p[0] for p in parts], op))
        )

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> Work:
        check.whole("reduce_scatter", out=out, x=x)
        check.stacked("reduce_scatter", x, out, self.size)
        check.reducible("reduce_scatter", x.dtype, op)
        return self._enter(
            f"reduce_scatter {op}", out, [x],
            lambda parts: _into(out, plain.reduced([p[0][self.rank] for p in parts], op)),
        )  # fmt: skip

    def reduce(self, x: Tensor, root: int = 0, op: Op = "sum") -> Work:
        check.rank("reduce", "root", root, self.size)
        check.whole("reduce", x=x)
        check.reducible("reduce", x.dtype, op)

        def act(parts: list[list[Tensor]]) -> None:
            if self.rank == root:
                x.copy_(plain.reduced([p[0] for p in parts], op))

        return self._enter(f"reduce {op} to {root}", x, [x], act)

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        check.whole("all_gather", out=out, x=x)
        check.stacked("all_gather", out, x, self.size)
        return self._enter("all_gather", x, [x], lambda parts: _rows(out, parts))

    def gather(self, out: Tensor | None, x: Tensor, root: int = 0) -> Work:
        check.rank("gather", "root", root, self.size)
        check.whole("gather", out=out, x=x)
        check.only_on_root("gather", "out", out, x, self.rank == root, self.size)
        return self._enter(f"gather to {root}", x, [x], lambda parts: _rows(out, parts))

    def scatter(self, out: Tensor, x: Tensor | None, root: int = 0) -> Work:
        check.rank("scatter", "root", root, self.size)
        check.whole("scatter", out=out, x=x)
        check.only_on_root("scatter", "x", x, out, self.rank == root, self.size)
        brought = [] if x is None else [x]
        return self._enter(
            f"scatter from {root}", out, brought, lambda parts: _into(out, parts[root][0][self.rank])
        )

    def all_to_all(self, out: Tensor, x: Tensor, out_counts: Sequence[int], counts: Sequence[int]) -> Work:
        check.whole("all_to_all", out=out, x=x)
        check.cut("all_to_all", "out", out, out_counts, self.size)
        check.cut("all_to_all", "x", x, counts, self.size)

        self.sent_bytes += (x.numel() - counts[self.rank]) * x.element_size()

        def act(parts: list[list[Tensor]]) -> None:
            for r, piece in enumerate(out.split(list(out_counts))):
                given = parts[r][self.rank]
                if given.shape != piece.shape:
                    self.room.fail(
                        f"all_to_all: rank {r} sends {given.numel()} elements to rank {self.rank}, which expects"
                        f" {piece.numel()}"
                    )
                    return
                piece.copy_(given)

        return self._enter("all_to_all", x[:0], list(x.split(list(counts))), act)

    def broadcast(self, x: Tensor, root: int = 0) -> Work:
        check.rank("broadcast", "root", root, self.size)
        check.whole("broadcast", x=x)
        return self._enter(f"broadcast from {root}", x, [x], lambda parts: _into(x, parts[root][0]))

    def send(self, x: Tensor, peer: int, tag: int = 0) -> Work:
        check.other("send", peer, self.rank, self.size)
        check.whole("send", x=x)
        self.sent_bytes += x.nbytes
        work = ThreadWork(self.room, object())
        self.room.post(Letter(work, self.rank, peer, tag, x), sends=True)
        return work

    def recv(self, x: Tensor, peer: int | None, tag: int = 0) -> Receipt:
        check.other("recv", peer, self.rank, self.size)
        check.whole("recv", x=x)
        work = ThreadWork(self.room, object())
        self.room.post(Letter(work, self.rank, peer, tag, x), sends=False)
        return work

    def barrier(self) -> Work:
        return self._enter("barrier", torch.zeros(0), [], lambda parts: None)

    def abort(self, reason: str) -> None:
        self.room.fail(reason, (self.rank,))

    def close(self) -> None:
        pass


_VERBS: dict[str, moves.Verb] = {verb: verb for verb in get_args(moves.Verb)}


def _into(x: Tensor, result: Tensor) -> None:
    x.copy_(result)


def _rows(out: Tensor | None, parts: list[list[Tensor]]) -> None:
    if out is not None:
        for rank, (part,) in enumerate(parts):
            out[rank].copy_(part)
