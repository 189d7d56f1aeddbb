"""The supervisor's line to the coordinator: hears events, tells of exits. Never blocks the supervisor's loop."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from echelon.clock import Deadline
from echelon.control.member import Member
from echelon.control.roster import OVER, Who
from echelon.control.rpc import Client, Identity
from echelon.env import Place
from echelon.errors import EchelonError, WorldError
from echelon.events import Event, from_dict

POLL_S = 1.0
JOIN_S = 60.0
TELL_S = 2.0


class Link:
    """Two threads beside the loop. If the coordinator is away or restarts, both try again until close()."""

    def __init__(self, place: Place, token: str, wake: Callable[[], None]) -> None:
        self._place, self._token, self._wake = place, token, wake
        self._heard: collections.deque[Event] = collections.deque()
        self._to_tell: queue.Queue[Event | tuple[str, dict[str, Any]] | None] = queue.Queue()
        self._over = threading.Event()
        self._began = time.monotonic()
        self._member: Member | None = None
        self._joined = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._hear, "echelon-hear"), (self._tell, "echelon-tell"))
        ]

    @property
    def silent_s(self) -> float:
        """How long ago the coordinator last answered."""
        return time.monotonic() - (self._member.answered if self._member is not None else self._began)

    def dial(self, deadline: Deadline) -> Client:
        """A connection of its own to the coordinator, which may still be starting. Blocks."""
        identity = Identity(self._place.run, self._place.role, self._place.rank, self._place.incarnation)
        return Client.connect(self._place.coordinator, self._token, identity, deadline)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def member(self) -> Member | None:
        """The supervisor's membership, None until it has joined."""
        return self._member

    def heard(self) -> list[Event]:
        """The events that came since the last call, in the coordinator's order."""
        events = []
        while self._heard:
            events.append(self._heard.popleft())
        return events

    def emit(self, event: Event) -> None:
        """An event of the supervisor's own, for everybody."""
        self._to_tell.put(event)

    def died(self, who: Who, code: int, incarnation: int = 0) -> None:
        """A worker or server is over: those who wait for it should know at once."""
        told = {"rank": who.rank, "code": code, "role": who.role, "incarnation": incarnation}
        self._to_tell.put(("died", told))

    def dismiss(self) -> None:
        """Servers are needed no more."""
        self._to_tell.put(("store.set", {"key": OVER, "value": b"1"}))

    def ask_stop(self, reason: str) -> None:
        """The run is to stop at its next step."""
        self._to_tell.put(("stop", {"reason": reason}))

    def cancel(self, reason: str, code: int) -> None:
        """The run is given up before its hosts came together: those who wait should know."""
        self._to_tell.put(("host.cancel", {"reason": reason, "code": code}))

    def close(self, deadline: Deadline) -> None:
        """Tells what is still to be told, until the deadline at most, and hangs up."""
        self._to_tell.put(None)
        if self._joined.is_set():
            self._threads[1].join(deadline.left_s)
        self._over.set()
        if self._member is not None:
            self._member.close(deadline)

    def _hear(self) -> None:
        while not self._over.is_set() and self._member is None:
            with contextlib.suppress(EchelonError):
                self._member = Member.join(self._place, self._token, Deadline.after(JOIN_S))
        if self._member is None:
            return
        self._joined.set()
        after, wire = 0, None
        while not self._over.is_set():
            try:
                wire = wire or self._member.dial(Deadline.after(JOIN_S))
                answer = wire.call("watch", Deadline.after(POLL_S + 5.0), after=after, timeout_s=POLL_S)
            except EchelonError:
                self._over.wait(0.1)
                continue
            after = answer["next"]
            for record in answer["events"]:
                with contextlib.suppress(ValueError, TypeError):
                    self._heard.append(from_dict(record))
            if answer["events"]:
                self._wake()

    def _tell(self) -> None:
        while not self._joined.wait(0.5):
            if self._over.is_set():
                return
        while (item := self._to_tell.get()) is not None:
            if self._member is None:
                return
            if isinstance(item, Event):
                self._member.emit(item)
                continue
            method, args = item
            for _ in range(3):
                try:
                    self._member.call(method, Deadline.after(TELL_S), **args)
                    break
                except WorldError:
                    self._over.wait(0.1)
                except EchelonError:
                    break
