"""For how long a server has been at work, seen from time to time: what rates are taken over. Pure."""

from __future__ import annotations


class Pace:
    """From the last look before the first work to the first look after the last."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._seen: tuple[float, int] | None = None
        self._began: float | None = None

    def look(self, now: float, count: int) -> float:
        """`count` pieces of work are done by `now`; gives the seconds at work so far."""
        before, self._seen = self._seen, (now, count)
        if count == (before[1] if before is not None else 0):
            return self.busy_s
        if self._began is None:
            self._began = before[0] if before is not None else now
        self.busy_s = now - self._began
        return self.busy_s
