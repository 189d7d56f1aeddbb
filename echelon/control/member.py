"""A process's membership of its run: joined, beating, and able to call the coordinator.

Three wires: one for calls, one for beats and events (so that a long call never silences a rank), and one more for
each dial(). The beat thread is the only one that sends events; emit() only queues.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from echelon.clock import Deadline
from echelon.control import forks
from echelon.control.beat import complete
from echelon.control.roster import SERVER
from echelon.control.rpc import Client, Identity, Unreached
from echelon.env import Place
from echelon.errors import EchelonError, UsageError, WorldError
from echelon.events import Beat, Event, Serving, Sign

BEAT_S = 0.5
FLUSH_S = 0.1
"""Events wait this long for company; they are out within 0.2 s."""

CALL_S = 10.0
CLOSE_S = 3.0
MAX_QUEUED = 20_000
MAX_SENT = 500


class Member:
    """This process in its run. Use from any thread; in a forked child it does nothing any more.

    If the coordinator is away, calls raise WorldError at their deadline, beats and events wait for it to come back.
    """

    def __init__(self, place: Place, token: str, deadline: Deadline) -> None:
        """Only connects; see join()."""
        self.place = place
        self.identity = Identity(place.run, place.role, place.rank, place.incarnation)
        self.description: dict[str, Any] = {}
        self.report: Callable[[], Sign] | None = None
        """This process's own sign of life: a worker's Beat, a server's Serving."""
        self.at_end: Callable[[], None] | None = None
        """Called when the script has come to its end: may raise what is wrong with that."""
        self.term = 0
        self.stop_requested = False
        self.lost_events = 0
        self.answered = time.monotonic()
        """When the coordinator last answered a beat."""
        self.token = token
        self._wake = threading.Condition()
        self._queue: collections.deque[dict[str, Any]] = collections.deque()
        self._num_sent = 0
        self._hurry = False
        self._batch = MAX_SENT
        self._closing: Deadline | None = None
        self._pid = os.getpid()
        self._calls = self.dial(deadline)
        self._beats = Client(place.coordinator, token, self.identity)
        self._thread = threading.Thread(target=self._beat, name="echelon-beat", daemon=True)
        forks.register(self)

    @classmethod
    def join(cls, place: Place, token: str, deadline: Deadline) -> Member:
        """Connects, learns what the run is, takes this rank's seat and starts to beat. Blocks until the deadline."""
        if not place.supervised:
            raise UsageError("there is no coordinator to join", remedy="Start the script with `echelon run`.")
        member = cls(place, token, deadline)
        try:
            member.description = member._twice("describe", deadline)
            member.term = member._twice("join", deadline, host=place.host, pid=os.getpid())["term"]
        except BaseException:
            member._calls.close()
            raise
        member._thread.start()
        return member

    def _twice(self, method: str, deadline: Deadline, **args: Any) -> dict[str, Any]:
        """A call that does no harm when it happens twice: a coordinator that ends just now is started again."""
        while True:
            try:
                return dict(self.call(method, deadline, **args))
            except Unreached:
                if deadline.left_s < 1.0:
                    raise

    def call(self, method: str, deadline: Deadline, **args: Any) -> Any:
        """One call to the coordinator. What may wait long (store.get, watch) goes over a wire of its own: see dial()."""
        return self._calls.call(method, deadline, **args)

    def dial(self, deadline: Deadline | None = None) -> Client:
        """A further connection of this process, for the caller to close."""
        return Client.connect(
            self.place.coordinator, self.token, self.identity, deadline or Deadline.after(CALL_S)
        )

    def emit(self, event: Event) -> None:
        """Queues an event; never blocks on the wire. A queue that nobody takes from loses its oldest (`lost_events`)."""
        with self._wake:
            if self._pid != os.getpid():
                return
            self._queue.append(event.to_dict())
            if len(self._queue) > MAX_QUEUED:
                self._queue.popleft()
                self._num_sent += 1
                self.lost_events += 1
            if len(self._queue) == 1:
                self._wake.notify()

    def roster(self) -> dict[int, dict[str, Any]]:
        """See control.roster.Roster."""
        return {int(rank): seat for rank, seat in self.call("roster", Deadline.after(CALL_S)).items()}

    def servers(self) -> dict[int, dict[str, Any]]:
        """See control.roster.Roster."""
        return {int(rank): seat for rank, seat in self.call("servers", Deadline.after(CALL_S)).items()}

    def flush(self, deadline: Deadline) -> None:
        """Blocks until everything queued so far was sent, or until the deadline."""
        with self._wake:
            goal, self._hurry = self._num_sent + len(self._queue), True
            self._wake.notify_all()
            while self._num_sent < goal and self._thread.is_alive() and not deadline.passed:
                self._wake.wait(min(0.05, deadline.left_s))
            self._hurry = False

    def close(self, deadline: Deadline | None = None) -> None:
        """Sends what is queued (for 3 s at most, if nothing else is said) and hangs up. May be called again."""
        if self._pid != os.getpid():
            return
        deadline = deadline or Deadline.after(CLOSE_S)
        with self._wake:
            self._closing = self._closing or deadline
            self._wake.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(deadline.left_s + 0.2)
        self._beats.close()
        self._calls.close()
        if _current is self:
            set_current(None)

    def after_fork(self) -> None:
        self._wake = threading.Condition()
        self._queue.clear()
        self.report = None
        if _current is self:
            set_current(None)

    def _beat(self) -> None:
        """The beat thread: a beat every BEAT_S, events FLUSH_S after the first of them, everything at the end."""
        due = time.monotonic()
        while True:
            # wait for the next beat, the first event, or the end
            with self._wake:
                while not self._queue and self._closing is None and time.monotonic() < due:
                    self._wake.wait(max(0.0, due - time.monotonic()))
                if self._closing is None and self._queue and not self._hurry:
                    self._wake.wait(min(FLUSH_S, max(0.0, due - time.monotonic())))
                closing = self._closing
                events = [self._queue[i] for i in range(min(self._batch, len(self._queue)))]
                first = self._num_sent
            # send
            timely = time.monotonic() >= due
            sent = self._send(self._own() if timely else {}, events, first, closing or Deadline.after(CALL_S))
            if timely:
                due = time.monotonic() + BEAT_S
            with self._wake:
                if sent:
                    self._forget(first + len(events))
                if closing is not None and (closing.passed or (sent and not self._queue)):
                    return
                if not sent and closing is None and self._batch > 1:
                    self._wake.wait(BEAT_S)

    def _forget(self, num_sent: int) -> None:
        while self._num_sent < num_sent and self._queue:
            self._queue.popleft()
            self._num_sent += 1
        self._wake.notify_all()

    def _own(self) -> dict[str, Any]:
        """This rank's beat. A report that raises costs its numbers, a look at the main thread that raises its place: not the
        beat, and not this thread, without which the rank would count as silent."""
        if self.report is None and self.place.role not in ("worker", "server"):
            return {}
        beat: Sign = (Serving if self.place.role == SERVER else Beat)(doing="starting")
        if self.report is not None:
            with contextlib.suppress(Exception):
                beat = self.report()
        try:
            return complete(beat, self.place.rank).to_dict()
        except Exception:
            return dataclasses.replace(beat, rank=self.place.rank).to_dict()

    def _send(
        self, beat: dict[str, Any], events: list[dict[str, Any]], first: int, deadline: Deadline
    ) -> bool:
        """True when the events are off our hands: taken, or such that they can never travel (counted as lost)."""
        try:
            answer = self._beats.call(
                "beat", deadline, beat=beat, events=events, first=first, sent=time.time()
            )
        except UsageError:
            alone = len(events) <= 1
            self.lost_events += len(events) if alone else 0
            self._batch = 1  # find the one that cannot travel, and lose no other with it
            return alone
        except EchelonError:
            return False
        self._batch = MAX_SENT if not events else self._batch
        self.term, self.stop_requested = answer["term"], answer["stop"]
        self.answered = time.monotonic()
        return True


class Joining:
    """A membership under way: the script may start (and import torch) while the coordinator answers."""

    def __init__(self, place: Place, token: str, deadline: Deadline) -> None:
        self.place = place
        self._member: Member | None = None
        self._error: BaseException | None = None
        self._deadline = deadline
        self._thread = threading.Thread(target=self._join, args=(token,), name="echelon-join", daemon=True)
        forks.register(self)
        self._thread.start()

    def after_fork(self) -> None:
        if _current is self:
            set_current(None)

    def _join(self, token: str) -> None:
        try:
            self._member = Member.join(self.place, token, self._deadline)
        except BaseException as error:
            self._error = error

    def result(self) -> Member:
        """The member; blocks until it has joined, raises what kept it from joining."""
        self._thread.join(self._deadline.left_s + 1.0)
        if self._error is not None:
            raise self._error
        if self._member is None:
            raise WorldError("the coordinator did not answer in time")
        return self._member


_current: Member | Joining | None = None


def set_current(member: Member | Joining | None) -> None:
    """Makes `member` the one that current() finds: role.py does this before the script runs."""
    global _current
    _current = member


def current() -> Member | None:
    """This process's member, or None: alone, or in a forked child. Waits for one that is still joining."""
    global _current
    if isinstance(_current, Joining):
        _current = _current.result()
    return _current
