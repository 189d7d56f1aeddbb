"""Calls that belong together: one of each worker. The last one to come carries out what all of them asked for. And what becomes of
calls that make no sense."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from echelon.errors import EchelonError, PeerLost, UsageError, WireError
from echelon.ps.service import Request


class Together:
    """Gathers one request of each worker under a key. Thread-safe. After a loss nothing comes together any more."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, dict[int, Request]] = {}
        self._lost: PeerLost | None = None

    def add(
        self, key: Hashable, request: Request, among: Sequence[int] | None = None
    ) -> list[Request] | None:
        """All of them in the order of ranks, to whoever brings the last; None to the others. Raises once a worker is gone. `among`:
        these workers only, who all say so."""
        rank = request.peer.rank
        ranks = range(self.num_workers) if among is None else among
        with self._lock:
            if self._lost is not None:
                raise again(self._lost)
            here = self._waiting.setdefault(key, {})
            if rank in here or rank not in ranks or not 0 <= rank < self.num_workers:
                raise UsageError(f"worker {rank} of {self.num_workers} asked for {request.verb} {key} twice")
            here[rank] = request
            if len(here) < len(ranks):
                return None
            del self._waiting[key]
        return [here[r] for r in ranks]

    def lose(self, rank: int, reason: str) -> None:
        """A worker is gone: whoever waits for it is told."""
        with self._lock:
            self._lost = self._lost or PeerLost(f"worker {rank} {reason}", peers=(rank,))
            waiting, self._waiting = [r for here in self._waiting.values() for r in here.values()], {}
        for request in waiting:
            if request.peer.rank != rank:
                request.refuse(again(self._lost))

    def renew(self, reason: str) -> None:
        """A new term begins: what is waited for is void, and nobody is lost any more."""
        with self._lock:
            self._lost = None
            waiting, self._waiting = [r for here in self._waiting.values() for r in here.values()], {}
        for request in waiting:
            request.refuse(PeerLost(reason))

    @property
    def lost(self) -> PeerLost | None:
        """A fresh error to raise, once a worker is gone."""
        return again(self._lost) if self._lost is not None else None

    @property
    def missing(self) -> dict[Hashable, list[int]]:
        """What is waited for: the ranks that have not come."""
        with self._lock:
            return {
                k: sorted(set(range(self.num_workers)) - here.keys()) for k, here in self._waiting.items()
            }


def some(head: Mapping[str, Any], num_workers: int) -> tuple[int, ...] | None:
    """The workers among which a call is, if it says so (`of`): in the order of ranks, each once."""
    told = head.get("of")
    if told is None:
        return None
    ranks = tuple(told)
    if not all(type(r) is int and 0 <= r < num_workers for r in ranks) or list(ranks) != sorted(set(ranks)):
        raise UsageError(f"{ranks!r} are not workers of {num_workers}")
    return ranks


SENSELESS = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RuntimeError)
"""What a head of the wrong form ends in, wherever it is first read."""


@contextlib.contextmanager
def sense(request: Request) -> Iterator[None]:
    """Whoever sent a head of the wrong form is told so."""
    try:
        yield
    except SENSELESS as error:
        told = f"{request.verb} of {request.peer} makes no sense: {type(error).__name__} {error}"
        raise WireError(told[:500]) from None


def carry_out(requests: list[Request], act: Callable[[], None]) -> None:
    """What all of them asked for; what is wrong with it is told to all."""
    try:
        with sense(requests[0]):
            act()
    except EchelonError as error:
        refuse_all(requests, error)


def check_alike(requests: Sequence[Request]) -> None:
    """Do all workers ask for the same step?"""
    for other in requests[1:]:
        first = requests[0].head
        if other.head != first and repr(other.head) != repr(first):  # a NaN is none's equal
            differs = [k for k in first if repr(other.head.get(k)) != repr(first.get(k))]
            raise UsageError(
                f"worker {other.peer.rank} steps with another {', '.join(differs)} than worker 0",
                remedy="Learning rates, parameter groups and clipping must be the same on every worker.",
            )


def refuse_all(requests: Sequence[Request], error: EchelonError) -> None:
    for request in requests:
        request.refuse(error)


def again(error: PeerLost) -> PeerLost:
    return PeerLost(error.message, remedy=error.remedy, peers=error.peers)
