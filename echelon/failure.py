"""What a worker says when its script raised: the user's part of the traceback, the code, and whose fault it was."""

from __future__ import annotations

import os
import runpy
import traceback
from types import TracebackType

from echelon.events import Failed
from echelon.mesh import limits, memory

PEER_TEXTS = (
    "connection closed by peer", "connection reset by peer", "broken pipe", "connection refused", "socket closed",
    "communicator was aborted", "remote process exited",
)  # fmt: skip
"""What gloo and NCCL say when another rank went away."""

MEMORY_TEXTS = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")
"""What torch says when an allocation failed."""

PEER_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "torch.distributed.")
MAX_TRACEBACK_CHARS = 20_000


def describe(
    error: BaseException, *, rank: int, host: str, step: int, role: str = "worker", run: str = ""
) -> Failed:
    """The event that tells of `error`. One for lack of memory is told what would take less."""
    line = error_line(error)
    if is_lack_of_memory(error):
        error.add_note(memory.advice(None if "CUDA" in line else limits.have(run)))
    return Failed(
        rank=rank, role=role, host=host, step=step, code=exit_code(error), error=line, traceback=user_traceback(error),
        consequence=bool(getattr(error, "consequence", False)) or sounds_like_a_lost_peer(line),
    )  # fmt: skip


def exit_code(error: BaseException) -> int:
    """The code with which python (and a shell) would end on this."""
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        return error.code & 0xFF if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return 130
    code = getattr(error, "exit_code", 1)
    return code if isinstance(code, int) and 0 < code < 256 else 1


def error_line(error: BaseException) -> str:
    """`ValueError: what it says`, the first line only; for sys.exit also the place, as there will be no traceback."""
    if isinstance(error, SystemExit):
        words = error.code if isinstance(error.code, int) else f'"{str(error.code).splitlines()[0]}"'
        return f"sys.exit({words}){_place(error)}"
    text = "".join(traceback.format_exception_only(error)).strip()
    lines = [line for line in text.splitlines() if line.strip()]
    kind = type(error).__name__
    for line in lines:  # a SyntaxError shows its place first
        if line.startswith((kind, f"{type(error).__module__}.{kind}")):
            return line.removeprefix("echelon.errors.")
    return lines[-1].strip() if lines else kind


def user_traceback(error: BaseException) -> str:
    """The traceback as plain python would print it: the frames that started the script are left out.

    As in plain python there is none for sys.exit: "".
    """
    if isinstance(error, SystemExit):
        return ""
    summary = traceback.TracebackException(type(error), error, _skip(error.__traceback__))
    text = "".join(summary.format()).rstrip("\n")
    if len(text) > MAX_TRACEBACK_CHARS:
        half = MAX_TRACEBACK_CHARS // 2
        text = f"{text[:half]}\n  …\n{text[-half:]}"
    return text


def sounds_like_a_lost_peer(line: str) -> bool:
    """Whether this error line only says that a connection to another rank broke."""
    text = line.lower()
    return line.startswith(PEER_ERRORS) and any(words in text for words in PEER_TEXTS)


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, here or in torch."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in MEMORY_TEXTS)


def _place(error: BaseException) -> str:
    """The last line of the user's own code on the way to the error."""
    library = os.path.dirname(os.__file__)
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((library, "<"))
    ]
    frames = [f for f in frames if os.path.abspath(f.filename) not in _STARTERS]
    return f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def _skip(tb: TracebackType | None) -> TracebackType | None:
    while tb is not None and _is_starter(tb):
        tb = tb.tb_next
    return tb


def _is_starter(tb: TracebackType) -> bool:
    name = tb.tb_frame.f_code.co_filename
    return name.startswith("<frozen ") or os.path.abspath(name) in _STARTERS


_STARTERS = (
    os.path.join(os.path.dirname(os.path.abspath(__file__)), "role.py"),
    os.path.join(os.path.dirname(os.path.abspath(__file__)), "explain", "rehearsal.py"),
    os.path.abspath(runpy.__file__),
)
