"""The run's key-value table: where ranks leave addresses for each other, and wait for those of others.

Every change is journaled (not synced: a machine that loses power loses its ranks as well), so that a restarted
coordinator knows what was said. Lives in the coordinator's event loop.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from echelon.errors import UsageError, WorldError

MAX_TABLE_BYTES = 64 << 20
MAX_KEYS = 1 << 16
MAX_KEY_CHARS = 1024
ENTRY_BYTES = 128
"""What a key costs beside its bytes."""

INT64 = range(-(1 << 63), 1 << 63)


class Table:
    """Bounded. `note` is given each change as a journal record before it can be seen."""

    def __init__(self, note: Callable[[dict[str, Any]], None]) -> None:
        self._note = note
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        self._waits: set[_Wait] = set()

    def set(self, key: str, value: bytes) -> None:
        self._put(key, value)

    def add(self, key: str, amount: int) -> int:
        """Adds to a number (absent: 0), which is kept as decimal text, as torch's stores do."""
        try:
            total = int(self._values.get(key, b"0")) + amount
        except ValueError:
            raise UsageError(f"store key {key!r} does not hold a number") from None
        if total not in INT64:
            raise UsageError(f"store key {key!r} would leave 64 bits")
        self._put(key, str(total).encode())
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Sets `desired` if the key holds `expected` (or is absent and nothing is expected); gives what it holds
        afterwards, or `expected` when it is absent and stays so."""
        now = self._values.get(key)
        if now == expected or (now is None and not expected):
            self._put(key, desired)
            return desired
        return expected if now is None else now

    def delete(self, key: str) -> bool:
        old = self._values.pop(key, None)
        if old is None:
            return False
        self._num_bytes -= len(old) + len(key) + ENTRY_BYTES
        self._note({"kind": "unset", "key": key})
        return True

    def has(self, keys: Iterable[str]) -> bool:
        return all(key in self._values for key in keys)

    def count(self) -> int:
        return len(self._values)

    async def get(self, key: str, timeout_s: float, lost: Callable[[], Exception | None]) -> bytes:
        """The value, waited for. `lost` as in wait()."""
        await self.wait([key], timeout_s, lost)
        return self._values[key]

    async def wait(self, keys: list[str], timeout_s: float, lost: Callable[[], Exception | None]) -> None:
        """Returns once all keys are there. Raises what `lost()` gives as soon as a rank that could have set them is
        gone, and WorldError that names a missing key at the timeout."""
        if self.has(keys):
            return
        gone = lost()
        if gone is not None:
            raise gone
        wait = _Wait([key for key in keys if key not in self._values], lost)
        self._waits.add(wait)
        try:
            await asyncio.wait_for(wait.done, timeout_s)
        except TimeoutError:
            missing = sorted(wait.keys)
            raise WorldError(
                f"{len(missing)} of {len(keys)} keys did not come within {timeout_s:g} s: {missing[0]!r}",
                remedy="A rank did not reach this point: `echelon status` shows where each one is.",
            ) from None
        finally:
            self._waits.discard(wait)

    def check_waits(self) -> None:
        """Ends the waits for what cannot come any more. Called after every change of membership."""
        for wait in list(self._waits):
            gone = wait.lost()
            if gone is not None and not wait.done.done():
                wait.done.set_exception(gone)

    def records(self) -> Iterator[dict[str, Any]]:
        """The table as journal records."""
        for key, value in self._values.items():
            yield _record(key, value)

    def restore(self, record: Mapping[str, Any]) -> None:
        """One record of the journal."""
        key = str(record["key"])
        old = self._values.pop(key, None)
        if old is not None:
            self._num_bytes -= len(old) + len(key) + ENTRY_BYTES
        if record["kind"] == "set":
            self._values[key] = base64.b64decode(record["value"])
            self._num_bytes += len(self._values[key]) + len(key) + ENTRY_BYTES

    def _put(self, key: str, value: bytes) -> None:
        if len(key) > MAX_KEY_CHARS:
            raise UsageError(f"a store key of {len(key)} characters is over {MAX_KEY_CHARS}")
        old = self._values.get(key)
        grown = len(value) - len(old) if old is not None else len(value) + len(key) + ENTRY_BYTES
        if self._num_bytes + grown > MAX_TABLE_BYTES or (old is None and len(self._values) >= MAX_KEYS):
            raise UsageError(
                f"the store is full: {len(self._values)} keys, {self._num_bytes >> 20} MiB",
                remedy="It is for addresses and small notes: delete keys that are read, send tensors through a Group.",
            )
        self._note(_record(key, value))
        self._values[key] = value
        self._num_bytes += grown
        for wait in list(self._waits):
            wait.keys.discard(key)
            if not wait.keys and not wait.done.done():
                wait.done.set_result(None)


class _Wait:
    """A caller that waits for keys."""

    def __init__(self, keys: Iterable[str], lost: Callable[[], Exception | None]) -> None:
        self.keys = set(keys)
        self.lost = lost
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


def _record(key: str, value: bytes) -> dict[str, Any]:
    return {"kind": "set", "key": key, "value": base64.b64encode(value).decode()}
