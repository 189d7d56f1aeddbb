"""What happened among the hosts of a run. See events.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from echelon.event import Event


@dataclass(frozen=True, kw_only=True)
class HostCame(Event):
    """A host enlisted: `here` of `wanted` are there."""

    host: str
    address: str
    here: int
    wanted: int


@dataclass(frozen=True, kw_only=True)
class HostWent(Event):
    """A host that had enlisted went away before the run formed."""

    host: str
    address: str
    here: int
    wanted: int


@dataclass(frozen=True, kw_only=True)
class HostRefused(Event):
    """The hosts did not come together, and why."""

    reason: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class HostsFormed(Event):
    """All hosts are there: index, name, address, and which workers and servers run on each, in order."""

    hosts: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class HostLost(Event):
    """A host is gone without a goodbye, and its workers with it."""

    host: str
    address: str
    index: int
    ranks: list[int]
    reason: str
    servers: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class HostLeft(Event):
    """A further host has ended everything of the run that it had."""

    host: str
    index: int


@dataclass(frozen=True, kw_only=True)
class HostAsked(Event):
    """Somebody asked a further host's supervisor to end the run."""

    host: str
    code: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Knocked(Event):
    """Somebody at `address` was refused by the coordinator: why is a key of handshake.REFUSALS."""

    address: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Printed(Event):
    """A line that workers of a further host printed, on its way to the first host's terminal."""

    host: str
    index: int
    stream: str
    ranks: list[int]
    text: str
