"""What this process is at, for the beat thread to read: how far it came, what its main thread does and waits in.

Whatever moves says so with `moved()`; what may take long stands inside `inside("run.save")`; a wait for other ranks stands
inside `waiting(...)`. Each costs well under a microsecond and takes no lock. Call sites are looked up by whoever
reads, so a wait does not pay for them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from echelon import dumps
from echelon.dumps import Frame

P = ParamSpec("P")
R = TypeVar("R")

DATA, COMPILING, IMPORTING, BACKWARD, ENDED = "data", "compiling", "importing", "backward", "script ended"
COMING = "coming back"
"""The label of a worker that was started again, until it is where the others are, and of those who wait for it to sit there."""
PHASE = "phase "
"""The label of a named rank-0 phase is this and its name."""

ANYBODY = 0
"""The number of a wait whose place in its group is not known: it is over when all ranks stand in it."""

SERVERS = "servers"
"""The group of a wait for parameter servers, for all of them; `servers 0,2` is for these. A number means that servers answer
once every worker has begun it (record it in `begun`, as for any group); ANYBODY that they answer whoever comes."""

WORKER = "worker "
"""The group of a wait for one worker, in a message: `worker 3 in pipeline`."""

MEMBERS = " of workers "
"""A group of some workers only has their ranks in its name: `gradients of workers 0,2`."""

TORCH = "torch-"
"""Groups of torch.distributed, which stand on ours."""

FRESH_S = 1.5


@dataclass
class _Look:
    frames: list[Frame] = field(default_factory=list)
    at: float = 0.0
    progress: int = -1


_last = _Look()
_progress = [0]
_waits: dict[int, tuple[str, int, str, int, float]] = {}
_labels: dict[int, str] = {}
_direct: list[Any] = ["", 0.0]
begun: dict[str, int] = {}
"""Group -> the number of the last operation that this rank began there."""


@dataclass(frozen=True)
class Wait:
    """The main thread waits for other ranks: operation `number` of `group`, for `for_s` seconds so far."""

    group: str
    number: int
    what: str
    num_bytes: int
    for_s: float


@dataclass(frozen=True)
class Now:
    """What a reader sees."""

    progress: int
    doing: str = ""
    """What is known better than the run's counters say; "" when there is nothing."""
    site: str = ""
    """The innermost line of the script's own code: "train.py:33 in <module>", with the file's full path."""
    wait: Wait | None = None
    begun: dict[str, int] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)
    """The main thread's, the innermost first."""


def moved() -> None:
    """Something went on: a part was yielded, a batch evaluated, a meeting ended, a piece written."""
    _progress[0] += 1


class waiting:
    """with waiting(group, number, what, bytes): this thread waits for other ranks. Its end counts as progress."""

    __slots__ = ("_before", "_record", "_thread")

    def __init__(self, group: str, number: int, what: str, num_bytes: int = 0) -> None:
        self._record = (group, number, what, num_bytes, time.monotonic())

    def __enter__(self) -> None:
        self._thread = thread = threading.get_ident()
        self._before = _waits.get(thread)
        _waits[thread] = self._record

    def __exit__(self, *error: object) -> None:
        _progress[0] += 1
        if self._before is None:
            _waits.pop(self._thread, None)
        else:
            _waits[self._thread] = self._before


class inside:
    """with inside(label): this thread is at something that has a name. The innermost name counts."""

    __slots__ = ("_before", "_label", "_thread")

    def __init__(self, label: str) -> None:
        self._label = label

    def __enter__(self) -> None:
        self._thread = thread = threading.get_ident()
        self._before = _labels.get(thread, "")
        _labels[thread] = self._label

    def __exit__(self, *error: object) -> None:
        _labels[self._thread] = self._before


coming = inside(COMING)
"""Entered where such a worker begins, left where it has arrived."""


def named(label: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The function runs inside `label`."""

    def wrap(fn: Callable[P, R]) -> Callable[P, R]:
        @wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with inside(label):
                return fn(*args, **kwargs)

        return call

    return wrap


def now() -> Now:
    """Where the main thread stands. Callable from any thread; one thread only (it remembers what it saw last)."""
    main = threading.main_thread().ident or 0
    walked = _frames()
    files = [file for file, _, _ in walked]
    wait = _waits.get(main)
    thread = main
    if wait is None and any(file.endswith("/torch/autograd/graph.py") for file in files):
        others = [(ident, record) for ident, record in list(_waits.items()) if ident != main]
        thread, wait = others[0] if others else (main, None)  # backward on a GPU runs in threads of its own
    label = _labels.get(thread) or _labels.get(main, "")
    known = recognised(files)
    doing = known if known in (DATA, COMPILING) and not label.startswith(PHASE) else label or known
    found = None
    if wait is not None:
        group, number, what, num_bytes, since = wait
        found = Wait(group, number, _spoken(what, group, label), num_bytes, time.monotonic() - since)
    else:
        found = _torch_wait(walked)
    return Now(_progress[0], doing, site(walked), found, dict(begun), walked)


def _frames() -> list[Frame]:
    """The main thread's frames: as they are when nothing has moved since the last look, else FRESH_S old at most. A look costs
    about a millisecond, and where things move nobody asks where they stand."""
    moved, at = _progress[0], time.monotonic()
    if not _last.frames or moved == _last.progress or at - _last.at >= FRESH_S:
        _last.frames, _last.at = dumps.main_frames(), at
    _last.progress = moved
    return _last.frames


def label() -> str:
    """What this thread is inside of; "" when it has no name."""
    return _labels.get(threading.get_ident(), "")


def own_site() -> str:
    """The innermost line of the script's own code in this thread."""
    walked: list[Frame] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(walked) < 200:
        walked.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return site(walked)


def site(walked: list[Frame]) -> str:
    """The innermost of these frames (innermost first) that is the script's: not ours, torch's or python's."""
    mine = [frame for frame in walked if not frame[0].startswith((_OURS, _torch(), "<"))]
    own = [frame for frame in mine if not _is_library(frame[0])]
    for file, line, name in (own or mine)[:1]:
        return f"{file}:{line} in {name}"
    return ""


def _spoken(what: str, group: str, label: str) -> str:
    if group.startswith(TORCH):
        return f"torch.distributed.{what}"
    if group.startswith(WORKER):
        return f"{what} {'to' if what == 'send' else 'from'} {group}"
    if label and label != DATA:
        return f"{what} in {label}" if not label.startswith(PHASE) else what
    return f"{what} of {group}" if group and not group.startswith(SERVERS) else what


def members(group: str) -> frozenset[int] | None:
    """The ranks of the workers in a group, or whom a message is for; None: all of them."""
    if group.startswith(WORKER):
        return frozenset({int(group.split()[1])})
    _, some, rest = group.partition(MEMBERS)
    return frozenset(int(rank) for rank in rest.split()[0].split(",")) if some else None


def recognised(files: list[str]) -> str:
    """What a thread is doing whose frames, the innermost first, lie in these files; "" when that cannot be seen."""
    for file in files:
        if file.startswith("<frozen importlib"):
            return IMPORTING
        if not file.startswith("<") and not _is_library(file):
            break  # the script's own code, even if it is being imported itself
    if any(file.endswith(_COMPILERS) for file in files):
        return COMPILING
    if any("/torch/utils/data/" in file for file in files):
        return DATA
    return BACKWARD if any("/torch/autograd/" in file for file in files) else ""


_COMPILERS = (
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/compile_fx.py",
    "/torch/_inductor/async_compile.py",
)
"""What is on the stack only while something is compiled, not whenever it runs."""


def _torch_wait(walked: list[Frame]) -> Wait | None:
    """A collective of torch.distributed that the script called itself, seen by its frame."""
    named = [
        f for f in walked[:6] if f[0].endswith("/torch/distributed/distributed_c10d.py") and f[2] != "wrapper"
    ]
    if not named:
        _direct[:] = ["", 0.0]
        return None
    what = named[-1][2]
    key = f"{what} {site(walked)}"
    if _direct[0] != key:
        _direct[:] = [key, time.monotonic()]
    return Wait("torch.distributed", ANYBODY, f"torch.distributed.{what}", 0, time.monotonic() - _direct[1])


def _is_library(file: str) -> bool:
    return file.startswith((_LIBRARY, _OURS)) or "/site-packages/" in file


def _torch() -> str:
    file = getattr(sys.modules.get("torch"), "__file__", None)
    return os.path.dirname(file) + os.sep if file else "\0"


_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
