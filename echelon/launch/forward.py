"""Lines of a further host's workers on their way to the first host's terminal: bounded, so that a flood stays at home."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from echelon.clock import Clock
from echelon.events import Printed
from echelon.launch.streams import Screen
from echelon.show.lines import Line

LINES_PER_S = 200.0
BURST = 400.0
MAX_CHARS = 2000


class Forward:
    """A Screen that shows lines here and sends them on. What is over the limit is counted and told in one line."""

    def __init__(
        self,
        screen: Screen,
        send: Callable[[Printed], None],
        host: str,
        index: int,
        clock: Clock = time.monotonic,
    ) -> None:
        self._screen, self._send, self._host, self._index = screen, send, host, index
        self._clock, self._room, self._at = clock, BURST, clock()
        self._dropped: dict[tuple[int, ...], int] = {}

    def lines(self, lines: Sequence[Line]) -> None:
        self._screen.lines(lines)
        now = self._clock()
        self._room, self._at = min(BURST, self._room + (now - self._at) * LINES_PER_S), now
        for line in lines:
            if self._room < 1.0:
                self._dropped[line.ranks] = self._dropped.get(line.ranks, 0) + 1
                continue
            if line.ranks in self._dropped:
                count = self._dropped.pop(line.ranks)
                self._pass("out", line.ranks, f"… {count} more lines, in its log on {self._host}")
            self._pass(line.stream, line.ranks, line.text)

    def _pass(self, stream: str, ranks: tuple[int, ...], text: str) -> None:
        self._room -= 1.0
        text = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} …"
        self._send(Printed(host=self._host, index=self._index, stream=stream, ranks=list(ranks), text=text))
