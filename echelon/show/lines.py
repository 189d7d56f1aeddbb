"""The workers' output as lines for a terminal: prefixed, in each worker's order, duplicates collapsed. Pure.

Bytes go in with the moment they came, lines come out. Raw bytes are kept elsewhere (logs/worker-N.log).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from echelon.clock import Clock

WINDOW_S = 0.2
"""A line waits this long for the same line of the other workers."""

PARTIAL_S = 2.0
"""A line without an end (a prompt, dots, a progress bar) is shown this often."""

COLUMNS = 80
"""What the run itself says fits a terminal of this width; what scripts print stays as it is."""

MAX_LINE_CHARS = 20_000
MAX_HELD = 500
"""More lines than this at once (a flood) are not held back for duplicates."""

_CONTROL = re.compile(
    r"\x1b\[[0-9;?]*[A-HJKSTfhlnsu]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]|[\x00-\x08\x0b\x0c\x0e-\x1a\x7f]"
)


@dataclass(frozen=True)
class Line:
    """One line to show: `ranks` all wrote `text` to `stream` ("out" or "err")."""

    stream: str
    ranks: tuple[int, ...]
    text: str
    host: str = ""
    """Where it was written, when that is not here."""

    def render(self, host: str) -> str:
        host = self.host or host
        if not self.text.strip():
            return f"[{host}:{spell_ranks(self.ranks)}]"
        count = f" (×{len(self.ranks)})" if len(self.ranks) > 1 else ""
        return f"[{host}:{spell_ranks(self.ranks)}] {self.text}{count}"


@dataclass
class _Held:
    stream: str
    text: str
    since: float
    ranks: list[int] = field(default_factory=list)


@dataclass
class _Partial:
    """The unfinished line of one stream of one worker."""

    data: bytearray = field(default_factory=bytearray)
    shown: bytes = b""
    next_show: float = 0.0


class Collapser:
    """Turns chunks of bytes into Lines. A worker's lines keep their order; equal lines of several are one.

    feed() when bytes came, due() regularly, finish(rank) when a worker is over, flush() at the end.
    """

    def __init__(self, num_workers: int, clock: Clock, window_s: float = WINDOW_S) -> None:
        self._num_workers, self._clock, self._window_s = num_workers, clock, window_s
        self._over: set[int] = set()
        self._partial: dict[tuple[int, str], _Partial] = {}
        self._held: list[_Held] = []

    def start(self, rank: int) -> None:
        """A worker begins; one that was over was started again."""
        self._over.discard(rank)

    def feed(self, rank: int, stream: str, data: bytes) -> list[Line]:
        """Takes what a worker wrote; gives the lines that need not wait any longer."""
        partial = self._partial.setdefault((rank, stream), _Partial())
        *whole, rest = (bytes(partial.data) + data).split(b"\n")
        for line in whole:
            self._hold(rank, stream, line, skip=partial.shown)
            partial.shown = b""
        if not partial.data or whole:
            partial.next_show = self._clock() + PARTIAL_S
        if len(rest) > MAX_LINE_CHARS:  # a bar of many rewrites needs only its last state
            rest = rest[rest.rfind(b"\r", 0, -1) + 1 :][-MAX_LINE_CHARS:]
        partial.data = bytearray(rest)
        return self._ready()

    def due(self) -> list[Line]:
        """The lines whose time has come: call at least every 0.1 s."""
        now = self._clock()
        for (rank, stream), partial in self._partial.items():
            if partial.data and now >= partial.next_show and bytes(partial.data) != partial.shown:
                self._hold(rank, stream, bytes(partial.data), skip=partial.shown)
                partial.shown, partial.next_show = bytes(partial.data), now + PARTIAL_S
        return self._ready()

    def finish(self, rank: int) -> list[Line]:
        """A worker is over: its unfinished lines are shown, and nobody waits for it any more."""
        for key in [key for key in self._partial if key[0] == rank]:
            partial = self._partial.pop(key)
            if partial.data:
                self._hold(*key, bytes(partial.data), skip=partial.shown)
        self._over.add(rank)
        return self._ready()

    def flush(self) -> list[Line]:
        """Everything that is left."""
        ready = [line for rank in {rank for rank, _ in self._partial} for line in self.finish(rank)]
        held, self._held = self._held, []
        return ready + [Line(h.stream, tuple(sorted(h.ranks)), h.text) for h in held]

    def _hold(self, rank: int, stream: str, data: bytes, skip: bytes) -> None:
        if skip and data == skip:
            return  # it was shown as a partial line
        if skip and data.startswith(skip) and b"\r" not in data[len(skip) :]:
            data = data[len(skip) :]
        text = clean(data)
        if not text and (b"\r" in data or skip):
            return
        # a new line stands right behind the worker's own last one, so that what the others said after it can still match
        start = 1 + max((i for i, held in enumerate(self._held) if rank in held.ranks), default=-1)
        for held in self._held[start:]:
            if held.text == text and held.stream == stream:
                held.ranks.append(rank)
                return
        self._held.insert(start, _Held(stream, text, self._clock(), [rank]))

    def _ready(self) -> list[Line]:
        """The head of the queue: as far as every worker said it, or up to the last line that is old enough."""
        now, alive = self._clock(), self._num_workers - len(self._over)
        count = 0
        for held in self._held:
            if sum(1 for rank in held.ranks if rank not in self._over) < alive:
                break
            count += 1
        for index, held in enumerate(self._held):  # what is old takes along all that stands before it
            if now - held.since >= self._window_s or len(self._held) - index > MAX_HELD:
                count = max(count, index + 1)
        ready, self._held = self._held[:count], self._held[count:]
        return [Line(h.stream, tuple(sorted(h.ranks)), h.text) for h in ready]


def clean(data: bytes) -> str:
    """Bytes as a terminal line would stand at its end: the last rewrite of a bar, no cursor movements, any encoding."""
    text = data.decode("utf-8", errors="replace").rstrip("\r")
    text = _CONTROL.sub("", text.rpartition("\r")[2])
    return text if len(text) <= MAX_LINE_CHARS else text[:MAX_LINE_CHARS] + " …"


def fold(text: str, columns: int = COLUMNS) -> list[str]:
    """A line of ours as lines that fit, cut at ` · ` or else behind a blank or comma; a word that is longer stays whole."""
    if len(text) <= columns:
        return [text]
    lines: list[str] = []
    indent = text[: len(text) - len(text.lstrip())]
    for piece in text.strip().split(" · "):
        if lines and len(lines[-1]) + len(piece) + 3 <= columns:
            lines[-1] += f" · {piece}"
        else:
            lines += _wrap(piece, columns, indent + "  " * bool(lines), f"{indent}  ")
    return lines


def _wrap(text: str, columns: int, first: str, rest: str) -> list[str]:
    """Words of `text` in lines that begin with `first` and then `rest`."""
    lines = [first]
    for word in re.split(r"(?<=[ ,])", text):
        if lines[-1].strip() and len(f"{lines[-1]}{word}".rstrip()) > columns:
            lines.append(rest)
        lines[-1] += word
    return [line.rstrip() for line in lines]


def spell_ranks(ranks: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> "0-2,5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
