"""What an event is. Whoever notices something builds a record and hands it to a sink; where it goes is injected. A record travels as
one JSON object with its type's name under "event".
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened, at `time` (seconds since 1970) on worker `rank` (None: the run itself)."""

    kinds: ClassVar[dict[str, type[Event]]] = {}

    time: float = field(default_factory=time.time)
    rank: int | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Event.kinds[cls.__name__] = cls

    def to_dict(self) -> dict[str, Any]:
        return {"event": type(self).__name__, **vars(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), default=str)


Sink = Callable[[Event], None]


def from_dict(record: dict[str, Any]) -> Event:
    """The event a dict describes; unknown kinds and fields are a ValueError (they came over a wire)."""
    fields = dict(record)
    kind = Event.kinds.get(str(fields.pop("event", "")))
    if kind is None:
        raise ValueError(f"unknown event {record.get('event')!r}")
    known = {f.name for f in dataclasses.fields(kind)}
    if not known >= set(fields):
        raise ValueError(f"unknown fields {sorted(set(fields) - known)} in {kind.__name__}")
    return kind(**fields)
