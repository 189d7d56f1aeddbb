"""How the ranks of a checkpoint agree: notes for rank 0, and words that are settled once.

Works beside training, in a background thread, and uses no collective: a step never waits for it.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any, Protocol

from echelon.clock import Deadline
from echelon.control.member import Member
from echelon.control.rpc import Client
from echelon.errors import PeerLost, WorldError

CALL_S = 10.0
RETRY_S = 0.1
SLICE_S = 5.0
CHUNK_BYTES = 4 << 20
"""A note travels in pieces of this size: a frame of the control wire is bounded."""


class Meeting(Protocol):
    """What ranks say to each other about one topic (a name that is used once). Calls block, from any thread.

    Each raises PeerLost, which names them, once a rank has died: then nothing is agreed any more. WorldError when the
    others cannot be reached.
    """

    def tell(self, topic: str, note: bytes) -> None:
        """Leaves this rank's note for rank 0."""

    def heard(self, topic: str, deadline: Deadline) -> list[bytes] | None:
        """Every rank's note, in rank order, once all are there; None at the deadline. For rank 0, once a topic."""

    def settle(self, topic: str, word: bytes) -> bytes:
        """The first word settles a topic for good: gives the one that holds, ours or an earlier one."""

    def settled(self, topic: str, deadline: Deadline) -> bytes | None:
        """The word that was settled, waited for; None at the deadline."""

    def forget(self, topic: str) -> None:
        """Rank 0: nobody will ask for this topic's word again."""

    def drop_notes(self, topic: str) -> None:
        """Rank 0: the notes of a topic will not be heard any more."""

    def close(self) -> None:
        """Hangs up. May be called again."""


class Room:
    """A meeting place of threads: the ranks of a test, or the one rank of a process alone."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._words: dict[str, bytes] = {}
        self._notes: dict[str, dict[int, bytes]] = {}
        self._gone: set[int] = set()

    def meeting(self, rank: int) -> Meeting:
        return _InRoom(self, rank)

    def lose(self, rank: int) -> None:
        """A rank is dead: everybody who waits hears of it."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()


def alone() -> Meeting:
    """The meeting of one rank."""
    return Room(1).meeting(0)


class _InRoom:
    """One rank in a Room."""

    def __init__(self, room: Room, rank: int) -> None:
        self._room, self._rank = room, rank

    def tell(self, topic: str, note: bytes) -> None:
        with self._room._changed:
            self._room._notes.setdefault(topic, {})[self._rank] = note
            self._room._changed.notify_all()

    def heard(self, topic: str, deadline: Deadline) -> list[bytes] | None:
        with self._room._changed:
            notes = self._room._notes.setdefault(topic, {})
            while len(notes) < self._room.size and not deadline.passed:
                self._check()
                self._room._changed.wait(deadline.left_s)
            if len(notes) < self._room.size:
                return None
            del self._room._notes[topic]
            return [notes[rank] for rank in range(self._room.size)]

    def settle(self, topic: str, word: bytes) -> bytes:
        with self._room._changed:
            self._room._changed.notify_all()
            return self._room._words.setdefault(topic, word)

    def settled(self, topic: str, deadline: Deadline) -> bytes | None:
        with self._room._changed:
            while topic not in self._room._words:
                self._check()
                if deadline.passed:
                    return None
                self._room._changed.wait(deadline.left_s)
            return self._room._words[topic]

    def forget(self, topic: str) -> None:
        with self._room._changed:
            self._room._words.pop(topic, None)

    def drop_notes(self, topic: str) -> None:
        with self._room._changed:
            self._room._notes.pop(topic, None)

    def close(self) -> None:
        pass

    def _check(self) -> None:
        if self._room._gone:
            gone = tuple(sorted(self._room._gone))
            raise PeerLost(f"waiting for others is over: {_ranks(gone)} ended", peers=gone)


class MemberMeeting:
    """Through the run's coordinator, over a wire of its own. It may restart meanwhile: what was said is in its journal.

    `term` is the one in which the ranks began to act together: a death after it ends every wait. Ranks make their
    meetings in the same order: the n-th of one is the n-th of the others, unless they have a `name`.
    """

    _made = itertools.count()

    def __init__(
        self, member: Member, rank: int, size: int, *, term: int | None = None, name: str | None = None
    ) -> None:
        self._member, self._rank, self._size = member, rank, size
        self._term = member.term if term is None else term
        number = next(MemberMeeting._made)
        self._prefix = f"checkpoint/term-{self._term}/{number if name is None else name}/"
        self._lock = threading.Lock()
        self._wire: Client | None = None

    def tell(self, topic: str, note: bytes) -> None:
        key = self._key(topic, self._rank)
        chunks = [note[at : at + CHUNK_BYTES] for at in range(0, len(note), CHUNK_BYTES)] or [b""]
        for number, chunk in enumerate(chunks[1:], 1):
            self._call("store.set", key=f"{key}.{number}", value=chunk)
        self._call("store.set", key=key, value=len(chunks).to_bytes(4, "big") + chunks[0])

    def heard(self, topic: str, deadline: Deadline) -> list[bytes] | None:
        keys = [self._key(topic, rank) for rank in range(self._size)]
        if not self._there(keys, deadline):
            return None
        return [self._take(key) for key in keys]

    def settle(self, topic: str, word: bytes) -> bytes:
        return bytes(self._call("store.compare_set", key=self._prefix + topic, expected=b"", desired=word))

    def settled(self, topic: str, deadline: Deadline) -> bytes | None:
        key = self._prefix + topic
        if not self._there([key], deadline):
            return None
        return bytes(self._call("store.get", key=key, timeout_s=0.0, term=self._term))

    def forget(self, topic: str) -> None:
        self._call("store.delete", key=self._prefix + topic)

    def drop_notes(self, topic: str) -> None:
        for rank in range(self._size):
            key = self._key(topic, rank)
            if self._call("store.check", keys=[key]):
                self._take(key)

    def close(self) -> None:
        with self._lock:
            wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def _key(self, topic: str, rank: int) -> str:
        return f"{self._prefix}{topic}/{rank}"

    def _take(self, key: str) -> bytes:
        """Reads a note, then deletes it."""
        first = bytes(self._call("store.get", key=key, timeout_s=0.0))
        names = [f"{key}.{number}" for number in range(1, int.from_bytes(first[:4], "big"))]
        note = first[4:] + b"".join(bytes(self._call("store.get", key=name, timeout_s=0.0)) for name in names)
        for name in (key, *names):
            self._call("store.delete", key=name)
        return note

    def _there(self, keys: list[str], deadline: Deadline) -> bool:
        """Waits for keys; a coordinator that is away for a while only costs time."""
        while True:
            slice_s = min(SLICE_S, deadline.left_s)
            try:
                self._dialed().call(
                    "store.wait",
                    Deadline.after(slice_s + CALL_S),
                    keys=keys,
                    timeout_s=slice_s,
                    term=self._term,
                )
                return True
            except WorldError:  # not there yet, or the connection broke
                if deadline.passed:
                    return False
            threading.Event().wait(min(RETRY_S, deadline.left_s))

    def _call(self, method: str, **args: Any) -> Any:
        """A call that may be repeated safely: a broken connection is tried again until CALL_S has passed."""
        deadline = Deadline.after(CALL_S)
        while True:
            try:
                return self._dialed().call(method, deadline, **args)
            except WorldError:
                if deadline.left_s <= RETRY_S:
                    raise
                threading.Event().wait(RETRY_S)

    def _dialed(self) -> Client:
        with self._lock:
            if self._wire is None:
                self._wire = self._member.dial(Deadline.after(CALL_S))
            return self._wire


def _ranks(ranks: tuple[int, ...]) -> str:
    return ("rank " if len(ranks) < 2 else "ranks ") + ", ".join(map(str, ranks))
