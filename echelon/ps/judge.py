"""One verdict over all servers: how far an update is clipped, and whether it is finite, where each server knows only its part.

Under sync the workers ask every server and put the answers together. Where workers are not at one place (bounded, async), servers tell
the one that leads shard 0, and it tells all of them the whole, once every shard was heard. If it dies, its successor hears them again;
a shard whose update was made already has nobody who reports it a second time, so every server remembers what it was told, and whoever
waits long asks the others for it.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from echelon.clock import Deadline
from echelon.errors import EchelonError, Late, LinkLost, PeerLost, UsageError
from echelon.ps.link import Link
from echelon.ps.service import Peer, Request
from echelon.ps.together import refuse_all, sense
from echelon.verdict import from_plain, to_plain

NAME = "judge"
REMEMBERED = 4096
"""Verdicts that are kept for who asks a second time."""

WAIT_S = 600.0
ASK_S = 1.0
"""How long a server waits for the whole before it asks the others whether they have it."""
LOOK_S = 0.25
"""How often a server that waits for the others looks whether a worker is gone."""


@dataclass(frozen=True)
class Summary:
    """What a server knows of an update's gradient: sums of squares by range, whether all is finite, and if not, whose parts are not, by
    (worker, key of the range)."""

    squares: Sequence[float]
    finite: bool = True
    whose: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Whole:
    """The same over all servers. `squares` is NaN unless every sum is finite."""

    squares: float
    finite: bool = True
    whose: tuple[tuple[int, int], ...] = ()


class Verdicts:
    """What this server was told, by model and update. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[int, ...], Whole] = OrderedDict()

    def put(self, key: tuple[int, ...], found: Whole) -> None:
        with self._lock:
            self._known[key] = found
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)

    def get(self, key: tuple[int, ...]) -> Whole | None:
        with self._lock:
            return self._known.get(key)


class Judge:
    """The service (service.Service) that every server offers and one is asked. `verdicts` are those of its server's own Reporter."""

    def __init__(self, num_shards: int, verdicts: Verdicts | None = None) -> None:
        self.num_shards, self.verdicts = num_shards, verdicts or Verdicts()
        self._lock = threading.Lock()
        self._told: OrderedDict[Any, dict[int, Summary]] = OrderedDict()
        self._waiting: dict[Any, list[Request]] = {}

    def called(self, request: Request) -> None:
        head = request.head
        if request.verb not in ("report", "known") or request.peer.role != "server":
            raise UsageError(
                f"{request.peer} called {request.verb} of {NAME}, which servers offer each other"
            )
        with sense(request):
            key = _key(int(head["model"]), head["update"])
            known = self.verdicts.get(key)
            if known is not None or request.verb == "known":
                request.answer(_plain(known) if known is not None else {})
                return
            squares = [float(x) for x in head["squares"]]
            shard, mine = (
                int(head["shard"]),
                Summary(squares, bool(head["finite"]), from_plain(head["whose"])),
            )
        if not 0 <= shard < self.num_shards:
            raise UsageError(f"there is no shard {shard} of {self.num_shards}")
        with self._lock:
            told = self._told.setdefault(key, {})
            if len(self._told) > REMEMBERED:  # the oldest: whole, or nobody waits for it any more
                old, _ = self._told.popitem(last=False)
                refuse_all(self._waiting.pop(old, []), PeerLost("this update was given up"))
            told[shard] = mine
            self._waiting.setdefault(key, []).append(request)
            if len(told) < self.num_shards:
                return
            waiting = self._waiting.pop(key)
        found = whole(told)
        for one in waiting:
            one.answer(_plain(found))

    def gone(self, peer: Peer) -> None:
        with self._lock:
            for key, waiting in list(self._waiting.items()):
                self._waiting[key] = [one for one in waiting if one.peer.link != peer.link]


def whole(told: Mapping[int, Summary]) -> Whole:
    """Over all ranges. Rounded once, so it does not depend on how they lie on servers."""
    every = [x for shard in sorted(told) for x in told[shard].squares]
    return Whole(
        math.fsum(every) if all(map(math.isfinite, every)) else math.nan,
        all(one.finite for one in told.values()),
        tuple(sorted({pair for one in told.values() for pair in one.whose})),
    )


def _key(model: int, update: Sequence[Any]) -> tuple[int, ...]:
    return (model, *map(int, update))


def _plain(found: Whole) -> dict[str, Any]:
    return {"squares": found.squares, "finite": found.finite, "whose": to_plain(found.whose)}


def _whole(told: Mapping[str, Any]) -> Whole:
    return Whole(float(told["squares"]), bool(told["finite"]), tuple(from_plain(told["whose"])))


class Court(Protocol):
    """How a server reaches the judge, and the other servers."""

    def connect(self, rank: int) -> Link | None:
        """To a server; None if it is not there now."""

    def judge(self) -> Link:
        """A connection to whoever leads shard 0 now. Raises EchelonError."""


class Reporter:
    """The asking end, on every server. For any number of threads."""

    def __init__(self, court: Court, num_servers: int = 0) -> None:
        self._court, self._num_servers, self.verdicts = court, num_servers, Verdicts()
        self._lock = threading.Lock()
        self._link: Link | None = None

    def verdict(
        self,
        shard: int,
        model: int,
        update: tuple[int, int],
        mine: Summary,
        lost: Callable[[], PeerLost | None],
    ) -> Whole:
        """The whole, once every shard was heard. `update` names it: the worker whose it is alone, or -1, and its number. Raises what
        lost() gives, if a worker that the others may wait for is gone."""
        head = {
            "shard": shard, "model": model, "update": list(update), "squares": list(mine.squares), "finite": mine.finite,
            "whose": to_plain(mine.whose),
        }  # fmt: skip
        deadline, ask_at, key = Deadline.after(WAIT_S), Deadline.after(ASK_S), _key(model, update)
        while True:
            try:
                pending = self._connected().call(f"{NAME}.report", head)
                while True:
                    try:
                        found = _whole(pending.wait(deadline.sooner(LOOK_S)).head)
                        self.verdicts.put(key, found)
                        return found
                    except Late:
                        gone = lost()
                        if gone is not None:
                            raise gone from None
                        if deadline.passed:
                            raise
                        if ask_at.passed:
                            known = self._known(key)
                            if known is not None:
                                return known
                            ask_at = Deadline.after(ASK_S)
            except LinkLost:
                if deadline.passed:
                    raise
                threading.Event().wait(LOOK_S)  # its successor is being named

    def _known(self, key: tuple[int, ...]) -> Whole | None:
        """What another server was told about it, if one was: its shard's update is made, and it reports no more."""
        model, *update = key
        for rank in range(self._num_servers):
            link = self._court.connect(rank)
            if link is None:
                continue
            try:
                told = (
                    link.call(f"{NAME}.known", {"model": model, "update": update})
                    .wait(Deadline.after(ASK_S))
                    .head
                )
                if told:
                    self.verdicts.put(key, _whole(told))
                    return _whole(told)
            except EchelonError:
                continue
            finally:
                link.close()
        return None

    def _connected(self) -> Link:
        with self._lock:
            if self._link is None or self._link.lost is not None:
                try:
                    self._link = self._court.judge()
                except LinkLost:
                    raise
                except EchelonError as error:
                    raise LinkLost(error.message, remedy=error.remedy) from None
            return self._link

    def close(self) -> None:
        with self._lock:
            if self._link is not None:
                self._link.close()
