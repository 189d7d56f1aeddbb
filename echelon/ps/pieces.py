"""The pieces of one epoch, dealt as workers ask: every piece is done exactly once, whoever goes in between. Pure.

    waiting -> out (with a worker) -> done

A piece is a number from 0 on; the data engine knows which samples it means. How many there are may be known only once a worker
came to the end of the data. What comes back is dealt before what was never dealt, the lowest first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

HELD = -1
"""In place of a worker: a part computed from it is here, and stays whoever goes."""


def runs(numbers: Iterable[int]) -> list[list[int]]:
    """[first, behind the last] of each stretch of neighbours."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return found


def numbers(told: Iterable[Sequence[int]]) -> list[int]:
    """What runs() was given."""
    return [number for begin, end in told for number in range(int(begin), int(end))]


class Pieces:
    """One epoch of one loader. `low` and `above` are those that were done in an earlier life of the run."""

    def __init__(self, low: int = 0, above: Iterable[int] = ()) -> None:
        self.low = low
        """All before this one are done."""
        self.total: int | None = None
        self.returned = 0
        """Pieces that came back: dealt, and not used."""
        self._above = set(above)
        """Done, from `low` on."""
        self._next = low
        self._back: list[int] = []
        self._out: dict[int, int] = {}

    def take(self, worker: int) -> int | None:
        """The next piece for this worker; None when none waits now."""
        if self._back:
            number = heapq.heappop(self._back)
        else:
            while self._next in self._above:
                self._next += 1
            if self.total is not None and self._next >= self.total:
                return None
            number, self._next = self._next, self._next + 1
        self._out[number] = worker
        return number

    def done(self, pieces: Iterable[int], worker: int) -> None:
        """They are in updates. What was not out with this worker is passed over: told twice, or dealt again already."""
        for number in pieces:
            if self._out.get(number) == worker:
                del self._out[number]
                self._above.add(number)
        while self.low in self._above:
            self._above.remove(self.low)
            self.low += 1
        self._next = max(self._next, self.low)

    def hold(self, number: int, worker: int) -> None:
        """A part that was computed from it is here: it stays, even if the worker goes."""
        if self._out.get(number) == worker:
            self._out[number] = HELD

    def adopt(self, done: Iterable[int], has: Iterable[int], worker: int) -> None:
        """What a worker knows, told to a server that deals in place of one that is gone: these are done, these it has. What else was
        dealt to it never reached it, and waits again."""
        self.done(done, worker)
        mine = set(has)
        self.back([number for number in self.of(worker) if number not in mine], worker)

    def plain(self) -> list[Any]:
        """All of it, for a copy: read() of this goes on as this one would."""
        out = [list(pair) for pair in sorted(self._out.items())]
        return [self.low, runs(self._above), self._next, self.total, out, self.returned]

    @classmethod
    def read(cls, told: Sequence[Any]) -> Pieces:
        low, above, following, total, out, returned = told
        made = cls(int(low), numbers(above))
        made._next, made.returned = int(following), int(returned)
        made.total = None if total is None else int(total)
        made._out = {int(number): int(worker) for number, worker in out}
        dealt = range(made.low, made._next)
        made._back = [n for n in dealt if n not in made._out and n not in made._above]
        return made

    def back(self, pieces: Iterable[int], worker: int) -> list[int]:
        """Not used: they wait again. Gives those that do."""
        found = [number for number in pieces if self._out.get(number) == worker]
        for number in found:
            del self._out[number]
            heapq.heappush(self._back, number)
        self.returned += len(found)
        return found

    def lose(self, worker: int) -> list[int]:
        """A worker is gone: what it had waits again."""
        return self.back(self.of(worker), worker)

    def holders(self) -> set[int]:
        """Workers that have some piece."""
        return set(self._out.values()) - {HELD}

    def of(self, worker: int) -> list[int]:
        return sorted(number for number, whose in self._out.items() if whose == worker)

    def end(self, total: int) -> None:
        """There are so many: pieces behind the end were none."""
        self.total = total
        self._next = min(self._next, total)
        self._out = {number: whose for number, whose in self._out.items() if number < total}
        self._back = [number for number in self._back if number < total]
        heapq.heapify(self._back)

    def plenty(self, workers: int) -> bool:
        """Do so many wait that a worker may take one ahead? Near the end one taken ahead would wait with a slow worker."""
        if self.total is None:
            return True
        return len(self._back) + self.total - self._next > workers

    @property
    def waiting(self) -> bool:
        """Can somebody take one now, as far as is known?"""
        return bool(self._back) or self.total is None or self._next < self.total

    @property
    def over(self) -> bool:
        """All are done."""
        return self.total is not None and not self._out and self.low >= self.total

    def state(self) -> tuple[int, list[int]]:
        """(low, above), for a checkpoint."""
        return self.low, sorted(self._above)
