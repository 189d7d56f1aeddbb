"""What happened, kept for those who watch (in memory, bounded) and for later (events.jsonl, one line an event).

What came over a wire is checked first: a field of the wrong type makes the event void, a long text is cut.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import math
import os
import time
from pathlib import Path
from typing import Any, get_type_hints

from echelon.clock import Clock
from echelon.control.calls import fits
from echelon.control.roster import SERVER, WORKER
from echelon.events import Beat, Event, Failed, Left, Logged, Printed, RunEnded, Serving, Sign, from_dict

BEAT_FILE_S = 5.0
"""events.jsonl gets one sign of life a process in this time; watchers get all."""

MAX_EVENTS = 10_000
MAX_EVENT_BYTES = 16 << 20
MAX_REPLY_EVENTS = 1_000
MAX_REPLY_BYTES = 4 << 20
MAX_TEXT_CHARS = 1 << 16
MAX_ITEMS = 1_000


class History:
    """Lives in the coordinator's event loop. Numbers grow for ever, across restarts of the coordinator too."""

    def __init__(self, path: Path, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._held: collections.deque[tuple[dict[str, Any], int]] = collections.deque()
        self._held_bytes = 0
        self._next = int(
            time.time() * 1e6
        )  # so that a watcher's place in an earlier life lies before this one
        self._beat_written: dict[tuple[type[Event], int | None], float] = {}
        self._kept_back: dict[tuple[type[Event], int | None], bytes] = {}
        """The last sign of each process, where the file lacks it."""
        self._news = asyncio.Event()

    def add(self, event: Event) -> None:
        """Takes one event in, writes its line, wakes those who watch."""
        line = event.to_json().encode() + b"\n"
        self._held.append((event.to_dict(), len(line)))
        self._held_bytes += len(line)
        self._next += 1
        while len(self._held) > MAX_EVENTS or self._held_bytes > MAX_EVENT_BYTES:
            self._held_bytes -= self._held.popleft()[1]
        if isinstance(event, RunEnded):
            self._write_signs()
        if self._due_in_file(event):
            self._kept_back.pop((type(event), event.rank), None)
            self._write(line)
        elif isinstance(event, Sign) and len(self._kept_back) < MAX_ITEMS:
            self._kept_back[type(event), event.rank] = line
        self._news.set()

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the run's control
            os.write(self._fd, line)

    def _write_signs(self) -> None:
        """The run is over: the file has everybody's last sign, with the counters of the whole run."""
        signs, self._kept_back = self._kept_back, {}
        for line in signs.values():
            self._write(line)

    async def watch(self, after: int, timeout_s: float) -> dict[str, Any]:
        """Events numbered `after` or later, at most as many as fit a reply; waits for one until the timeout."""
        if after >= self._next:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), timeout_s)
        oldest = self._next - len(self._held)
        start = min(max(0, after - oldest), len(self._held))
        events: list[dict[str, Any]] = []
        num_bytes = 0
        for index in range(start, min(len(self._held), start + MAX_REPLY_EVENTS)):
            event, size = self._held[index]
            num_bytes += size
            if events and num_bytes > MAX_REPLY_BYTES:
                break
            events.append(event)
        return {"events": events, "next": oldest + start + len(events)}

    def close(self) -> None:
        self._write_signs()
        os.close(self._fd)

    def _due_in_file(self, event: Event) -> bool:
        if isinstance(event, Printed):
            return False  # its host keeps it in a log
        if not isinstance(event, Sign):
            return True
        now, whose = self._clock(), (type(event), event.rank)
        if now - self._beat_written.get(whose, -math.inf) < BEAT_FILE_S:
            return False
        if len(self._beat_written) > MAX_ITEMS:
            self._beat_written.clear()
        self._beat_written[whose] = now
        return True


def read_event(record: dict[str, Any]) -> Event | None:
    """The event that came over a wire, its texts and lists cut to size; None when it is not one of ours."""
    try:
        event = from_dict(record)
    except (ValueError, TypeError):
        return None
    hints = _HINTS.setdefault(type(event), get_type_hints(type(event)))
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        if not fits(value, hints[field.name]):
            return None
        changes[field.name] = _cut(value)
    return dataclasses.replace(event, **changes)


_HINTS: dict[type, dict[str, Any]] = {}


def said_by(role: str, rank: int, record: dict[str, Any]) -> Event | None:
    """The event that a process of that role told. Workers and servers speak for themselves only: what a server says never
    counts as the word of the worker with its number."""
    if role not in (WORKER, SERVER):
        return read_event(record)
    own = {"rank": rank} | ({"role": role} if record.get("event") == "Failed" else {})
    event = read_event({**record, **own})
    if role == WORKER:
        return None if isinstance(event, Serving) else event
    if event is None or isinstance(event, Serving | Failed):
        return event
    return None if isinstance(event, Beat | Left | Logged) else dataclasses.replace(event, rank=None)


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_TEXT_CHARS:
        return value[: MAX_TEXT_CHARS // 2] + "\n… cut …\n" + value[-MAX_TEXT_CHARS // 2 :]
    if isinstance(value, list):
        return [_cut(item) for item in value[:MAX_ITEMS]]
    if isinstance(value, dict):
        return {_cut(key): _cut(item) for key, item in list(value.items())[:MAX_ITEMS]}
    return value
