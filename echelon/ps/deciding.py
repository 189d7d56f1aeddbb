"""Which parts make the next update, where the first ones do (backup, aggregate): quorum.py's decisions, and what follows from them
for the ledger of pieces. Pure.

The first server decides, about parts that every server has. An update is an entry of the log: workers bring it to the servers,
which carry it out once, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.ps.decisions import Accept, Apply, Decision, Drop, Grant, Part
from echelon.ps.ledger import Ledger
from echelon.ps.pieces import HELD, Pieces
from echelon.ps.quorum import Quorum

Piece = tuple[int, int, int]
"""(Loader, epoch, number)."""


class Steps(Quorum):
    """Pieces are taken beside (pieces.py), ahead of the step that they are for: `more` says whether some wait."""

    def __init__(
        self, members: Mapping[int, int], more: Callable[[], bool], *, backup: int, aggregate: int
    ) -> None:
        super().__init__(members, Endless(), backup=backup, aggregate=aggregate)
        self.kept = 0  # a server is told of an update by the first worker that knows of it
        self.more = more

    def _complete(self) -> str:
        if len(self.here) >= self.need:
            return f"the first {len(self.here)} parts of step {self.version} are here, {self.need} are needed"
        if not self.more() and not self._computing_now():
            return (
                f"{len(self.here)} of {self.need} parts of step {self.version}: no other is left in the epoch"
            )
        return ""


class Endless(Ledger):
    """Whoever may compute may go on: whether there is a piece, it learns where it takes one."""

    def __init__(self) -> None:
        super().__init__((0,))

    def deal(self, worker: int, most: int = 1) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Entry:
    """Update `version` turns it into the next: of these (worker, number, samples), by the numbers of worker `lead`."""

    version: int
    parts: tuple[tuple[int, int, int], ...]
    lead: int

    def plain(self) -> list[Any]:
        return [self.version, [list(part) for part in self.parts], self.lead]


@dataclass(frozen=True)
class Answer:
    """A worker may go on: the version it may compute on, the updates that lead there, and whether its part counts (None: there was none)."""

    worker: int
    version: int
    log: list[list[Any]]
    used: bool | None


class Decider:
    """One model's. `find` gives the pieces of (loader, epoch), if it is open; `more`: do pieces wait?"""

    def __init__(
        self,
        members: Iterable[int],
        backup: int,
        aggregate: int,
        find: Callable[[int, int], Pieces | None],
        more: Callable[[], bool],
    ) -> None:
        self.policy = Steps(dict.fromkeys(members, 0), more, backup=backup, aggregate=aggregate)
        self.dropped = 0
        self.samples: dict[int, int] = {}
        """Worker -> samples of its parts that are in updates."""
        self._find = find
        self._log: list[Entry] = []
        self._knows = dict.fromkeys(self.policy.members, 0)
        """Worker -> the version that it has."""
        self._pieces: dict[tuple[int, int], tuple[Piece, ...]] = {}
        self._used: dict[int, bool] = {}

    def part(
        self, worker: int, number: int, version: int, count: int, pieces: Sequence[Sequence[int]]
    ) -> list[Answer]:
        """Every server has part `number` of this worker, computed on `version`; it asks how to go on."""
        self._enter(worker, version)
        self._pieces[worker, number] = tuple((int(f), int(e), int(n)) for f, e, n in pieces)
        self.policy.granted[worker] = Grant(worker, number, version, "it computed this")
        decisions = self.policy.arrived(Part(worker, number, version, count))
        return self._carry_out([*decisions, *self.policy.asked(worker, number + 1)])

    def catch_up(self, worker: int, version: int, begins: bool) -> Answer:
        """This worker wants the newest version, because it waited for a piece and begins, or to look at it."""
        if begins:
            self._enter(worker, version)
            self.policy.granted[worker] = Grant(worker, 0, self.policy.version, "it begins")
        self._knows[worker] = version
        return self._answer(worker)

    def _enter(self, worker: int, version: int) -> None:
        self._knows[worker] = version
        self.policy.members.setdefault(worker, 0)

    def idle(self, worker: int) -> list[Answer]:
        """There is no piece for this worker now: no part of it is on its way."""
        if self.policy.granted.pop(worker, None) is None:
            return []
        return self.look()

    def look(self) -> list[Answer]:
        """Something changed about the pieces."""
        return self._carry_out(self.policy._go_on())

    def took(self, worker: int) -> None:
        """This worker took a piece: a part of it is on its way, unless it waits for an update and took the piece ahead."""
        policy = self.policy
        if worker in policy.members and worker not in policy.granted and worker not in policy._asking:
            policy.granted[worker] = Grant(worker, 0, self._knows.get(worker, 0), "it took a piece")

    def left(self, worker: int) -> list[Answer]:
        """This worker left its loop; it may come back."""
        return self._carry_out(self.policy.lost(worker))

    def lost(self, worker: int) -> list[Answer]:
        """This worker is gone."""
        self._knows.pop(worker, None)
        return self.left(worker)

    def _carry_out(self, decisions: Sequence[Decision]) -> list[Answer]:
        answers = []
        for decision in decisions:
            match decision:
                case Accept(part):
                    self._used[part.worker] = True
                    self._each(part, lambda pieces, n, worker=part.worker: pieces.hold(n, worker))
                case Drop(part):
                    self.dropped += 1
                    self._used[part.worker] = False
                    self._each(part, lambda pieces, n, worker=part.worker: pieces.back([n], worker))
                    self._pieces.pop((part.worker, part.step), None)
                case Apply(step, parts):
                    told = tuple((p.worker, p.step, p.count) for p in parts)
                    lead = max(parts, key=lambda p: (p.step, -p.worker)).worker
                    self._log.append(Entry(step, told, lead))
                    for part in parts:
                        self.samples[part.worker] = self.samples.get(part.worker, 0) + part.count
                        self._each(part, lambda pieces, n: pieces.done([n], HELD))
                        self._pieces.pop((part.worker, part.step), None)
                case Grant(worker):
                    answers.append(self._answer(worker))
        return answers

    def _each(self, part: Part, act: Callable[..., object]) -> None:
        for feed, epoch, number in self._pieces.get((part.worker, part.step), ()):
            pieces = self._find(feed, epoch)
            if pieces is not None:
                act(pieces, number)

    def _answer(self, worker: int) -> Answer:
        known = self._knows.get(worker, 0)
        log = [entry.plain() for entry in self._log if entry.version >= known]
        self._knows[worker] = self.policy.version
        oldest = min(self._knows.values())
        self._log = [entry for entry in self._log if entry.version >= oldest]
        return Answer(worker, self.policy.version, log, self._used.pop(worker, None))
