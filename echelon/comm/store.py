"""A torch.distributed store that is the run's coordinator: authenticated, on one interface, nothing of it unpickled.

Groups of torch find each other through it. It opens no port; torch's own TCPStore, which asks nobody for anything
and listens on every interface, is not used.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from echelon import activity
from echelon.clock import Deadline
from echelon.control.member import Member
from echelon.control.rpc import Client
from echelon.errors import EchelonError, UsageError

SLACK_S = 5.0
"""What an answer may take beyond the wait that was asked for."""

TIMEOUT_S = 300.0


class CoordinatorStore(Store):
    """The store of one term of a run. Calls block; they may come from several threads and do not wait for each other.

    Keys of different terms and names do not meet. A wait ends with PeerLost, which names the ranks, soon after one
    of them died or failed in this term. What a call raised is kept in `failure`, since torch's C++ turns some
    errors into a RuntimeError on their way. Stays alive until close(), even if only C++ holds it.
    """

    def __init__(
        self, member: Member, *, name: str = "", term: int | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        super().__init__()
        self.member, self.name = member, name
        self.term = member.term if term is None else term
        self.failure: EchelonError | None = None
        self._prefix = f"term-{self.term}/{name}/"
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[Client] = []
        self._closed = False
        super().set_timeout(timedelta(seconds=timeout_s))
        _alive.add(self)

    def set(self, key: str, value: bytes | str) -> None:
        self._call("store.set", key=self._key(key), value=_bytes(value))

    def get(self, key: str) -> bytes:
        """The value of `key`, waited for up to the store's timeout."""
        return bytes(self._wait("store.get", self._timeout_s, key=self._key(key)))

    def add(self, key: str, amount: int) -> int:
        return int(self._call("store.add", key=self._key(key), amount=amount))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        """Blocks until every key is there."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        self._wait("store.wait", timeout_s, keys=[self._key(key) for key in keys])

    def check(self, keys: list[str]) -> bool:
        return bool(self._call("store.check", keys=[self._key(key) for key in keys]))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        told = self._call(
            "store.compare_set", key=self._key(key), expected=_bytes(expected), desired=_bytes(desired)
        )
        return bytes(told)

    def append(self, key: str, value: bytes | str) -> None:
        now = b""
        while True:  # ends, because each failed turn means that another rank's append went through
            if self.check([key]):
                now = self.get(key)
            wanted = now + _bytes(value)
            if self.compare_set(key, now, wanted) == wanted:
                return

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes | str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        return bool(self._call("store.delete", key=self._key(key)))

    def num_keys(self) -> int:
        """All keys of the run, other terms and names included."""
        return int(self._call("store.count"))

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._timeout_s = timeout.total_seconds()

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> CoordinatorStore:
        """Itself: calls of several threads do not wait for each other anyway."""
        return self

    deleteKey = delete_key  # the names under which torch's C++ looks
    getNumKeys = num_keys

    def close(self) -> None:
        """Hangs up. Groups that stand on it go on, but no new ones form."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for client in idle:
            client.close()
        _alive.discard(self)

    def _key(self, key: str) -> str:
        return self._prefix + key

    def _wait(self, method: str, timeout_s: float, **args: Any) -> Any:
        with activity.waiting("start", activity.ANYBODY, "the other workers to come (echelon.init)"):
            return self._call(method, wait_s=timeout_s, timeout_s=timeout_s, term=self.term, **args)

    def _call(self, method: str, wait_s: float = 0.0, **args: Any) -> Any:
        deadline = Deadline.after(wait_s + SLACK_S)
        try:
            client = self._take(method, deadline)
            try:
                return client.call(method, deadline, **args)
            finally:
                self._put_back(client)
        except EchelonError as error:
            self.failure = error
            raise

    def _take(self, method: str, deadline: Deadline) -> Client:
        with self._lock:
            if self._closed:
                raise UsageError(f"{method}: this store is closed")
            if self._idle:
                return self._idle.pop()
        return self.member.dial(deadline)

    def _put_back(self, client: Client) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(client)
                return
        client.close()


_alive: set[CoordinatorStore] = set()


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
