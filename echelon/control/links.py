"""This process's connections to other machines, and since when one of them gets no answer: out of /proc alone.

A kernel that gets no acknowledgement sends again, at growing distances, and counts. A peer whose process stands still does
acknowledge, and so does a slow link; what counts up is a dead link, or a dead machine. No socket is touched.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from echelon.clock import Clock

RESENT = 3
"""So often a packet was sent again, or a closed window asked about: 1.4 s at least without any answer."""

MAX_LINKS = 64
LISTENING = "0A"


@dataclass
class Links:
    """Remembers since when a connection gets no answer. One thread reads."""

    clock: Clock = time.monotonic
    _since: dict[str, float] = field(default_factory=dict)

    def read(self) -> dict[str, float]:
        """{"local remote": seconds without an answer, 0 for one that is answered}, the unanswered first; loopback is left out.

        Both ends are "address:port". At most 64; empty where the system has no such files.
        """
        inodes, tables = _sockets(), []
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                tables.append(Path(f"/proc/self/net/{name}").read_text())
        return self.judge(tables, inodes)

    def judge(self, tables: list[str], inodes: set[str]) -> dict[str, float]:
        """The same out of the text of /proc/net/tcp and tcp6, and the socket numbers of this process."""
        now, found, since = self.clock(), {}, {}
        for ends, unanswered in connections(tables, inodes):
            if unanswered:
                since[ends] = self._since.get(ends, now)
            found[ends] = now - since[ends] if unanswered else 0.0
        self._since = since
        worst = sorted(found, key=lambda ends: (ends not in since, -found[ends], ends))
        return {ends: found[ends] for ends in worst[:MAX_LINKS]}


def connections(tables: list[str], inodes: set[str]) -> Iterator[tuple[str, bool]]:
    """("local remote", is it unanswered?) of every connection that has one of these socket numbers."""
    for line in "\n".join(tables).splitlines():
        words = line.split()
        if len(words) < 10 or words[9] not in inodes or words[3] == LISTENING:
            continue
        local, remote = _end(words[1]), _end(words[2])
        if local is not None and remote is not None:
            yield f"{local} {remote}", max(int(words[6], 16), int(words[8])) >= RESENT


def _end(text: str) -> str | None:
    """ "0100007F:1F90" as "127.0.0.1:8080"; None for a loopback address."""
    number, _, port = text.partition(":")
    raw = b"".join(bytes.fromhex(number[i : i + 8])[::-1] for i in range(0, len(number), 8))
    address = ipaddress.ip_address(raw)
    address = getattr(address, "ipv4_mapped", None) or address
    return None if address.is_loopback else f"{address}:{int(port, 16)}"


def _sockets() -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found
