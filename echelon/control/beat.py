"""What a rank publishes about itself with every beat, so that even a stopped one shows where it was."""

from __future__ import annotations

import dataclasses
import resource
import sys
import threading
from types import FrameType
from typing import TypeVar

from echelon import activity
from echelon.control.links import Links
from echelon.events import Serving, Sign

S = TypeVar("S", bound=Sign)

MAX_FRAMES = 12
LINKS_AFTER_S = 3.0
"""A worker's connections are looked at once a wait has lasted this long; a server's always, since it waits for nobody."""

_links = Links()


def main_stack(limit: int = MAX_FRAMES) -> list[str]:
    """The main thread's innermost frames, the innermost last, each as "file:line function". Callable from any thread."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[str] = []
    while isinstance(frame, FrameType) and len(lines) < limit:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return lines[::-1]


def complete(beat: S, rank: int) -> S:
    """`beat` with rank, and with what the process itself knows: stack, memory, what its main thread does and waits in."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    now = activity.now()
    wait = now.wait or activity.Wait("", 0, "", 0, 0.0)
    stack = beat.stack or main_stack()
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
