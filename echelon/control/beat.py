"""What a rank publishes about itself with every beat, so that even a stopped one shows where it was."""

from __future__ import annotations

import dataclasses
import resource
from typing import TypeVar

from echelon import activity
from echelon.control.links import Links
from echelon.events import Serving, Sign

S = TypeVar("S", bound=Sign)

MAX_FRAMES = 12
LINKS_AFTER_S = 3.0
"""A worker's connections are looked at once a wait has lasted this long; a server's always, since it waits for nobody."""

_links = Links()


def complete(beat: S, rank: int) -> S:
    """`beat` with rank, and with what the process itself knows: stack, memory, what its main thread does and waits in."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    now = activity.now()
    wait = now.wait or activity.Wait("", 0, "", 0, 0.0)
    innermost = [f"{file}:{line} {name}" for file, line, name in now.frames[:MAX_FRAMES]]
    stack = beat.stack or innermost[::-1]
    look = wait.for_s >= LINKS_AFTER_S or isinstance(beat, Serving)
    place, _, name = now.site.rpartition(" in ")
    file = place.rpartition(":")[0]
    if file and not any(frame.startswith(file) for frame in stack):  # deep in a library
        stack = [f"{place} {name}", *stack[1:]]
    return dataclasses.replace(
        beat, rank=rank, stack=stack, peak_rss_bytes=beat.peak_rss_bytes or usage.ru_maxrss * 1024,
        doing=now.doing or beat.doing, progress=now.progress, cpu_s=usage.ru_utime + usage.ru_stime, site=now.site,
        waits_in=wait.what, waits_group=wait.group, waits_number=wait.number, waits_bytes=wait.num_bytes,
        waits_s=wait.for_s, begun=now.begun, links=_links.read() if look else {},
    )  # fmt: skip
