"""What the dealing server decided, kept on the server that has its copy: nobody is told of it before it is there.

The record is small and replaces the one before, so a copy that comes back needs only the newest, and what happens while one is on its
way goes with the next: however many workers ask at a time, there is one message for all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from echelon.control.roster import JOINED, Roster
from echelon.errors import EchelonError
from echelon.ps.session import Training

SHARD = 0
"""Whoever leads it deals."""

LOOK_S = 0.2


class Notes(Protocol):
    """Where records are kept."""

    def keep(self, change: int, read: Callable[[], tuple[int, dict[str, Any]]]) -> None:
        """Returns once the copy has everything up to this change, or there is none. `read` gives the newest change and the record of all."""

    def left(self) -> dict[str, Any] | None:
        """What a leader that is gone left here."""

    def watch(self, missing: Callable[[], Collection[int]], lose: Callable[[Iterable[int]], None]) -> None:
        """Workers that are `missing`, since they have not come to this server yet, may be gone: then `lose` is told, from a thread, until
        none is missing."""


class NoNotes:
    """Of a server without a copy."""

    def keep(self, change: int, read: Callable[[], tuple[int, dict[str, Any]]]) -> None:
        pass

    def left(self) -> dict[str, Any] | None:
        return None

    def watch(self, missing: Callable[[], Collection[int]], lose: Callable[[Iterable[int]], None]) -> None:
        pass


class Noted:
    """See Notes: on the partner of whoever leads the first shard."""

    def __init__(self, training: Training, roster: Roster) -> None:
        self.training, self.roster = training, roster
        self._lock = threading.Lock()
        self._kept = 0
        self._last: dict[str, Any] | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, change: int, read: Callable[[], tuple[int, dict[str, Any]]]) -> None:
        mirror = self.training.mirrors.get(SHARD)
        if mirror is None:
            return
        with self._lock:
            if change <= self._kept:
                return
            newest, record = read()
            if record != self._last:
                mirror.note(record)
                self._last = record
            self._kept = newest

    def left(self) -> dict[str, Any] | None:
        found = self.training.copies.notes.get(SHARD)
        return found[1] if found is not None else None

    def watch(self, missing: Callable[[], Collection[int]], lose: Callable[[Iterable[int]], None]) -> None:
        self._thread = threading.Thread(
            target=self._watch, args=(missing, lose), name="ps-missing", daemon=True
        )
        self._thread.start()

    def _watch(self, missing: Callable[[], Collection[int]], lose: Callable[[Iterable[int]], None]) -> None:
        while (absent := missing()) and not self._closed.wait(LOOK_S):
            try:
                seats = self.roster.roster()
            except EchelonError:  # the coordinator is being started again
                continue
            lose(rank for rank in absent if seats.get(rank, {}).get("state", JOINED) != JOINED)

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(5)
