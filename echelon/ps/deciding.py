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
        self._fates: dict[int, tuple[int, bool]] = {}
        """Worker -> its last part that was counted or dropped, and which of the two: it may not have heard of it."""

    def part(
        self, worker: int, number: int, version: int, count: int, pieces: Sequence[Sequence[int]]
    ) -> list[Answer]:
        """Every server has part `number` of this worker, computed on `version`; it asks how to go on. It may ask a second time, when
        whoever decided is gone and this one knows what was decided."""
        self._enter(worker, version)
        used = self.fate(worker, number)
        if used is not None:
            self._used[worker] = used
            if worker in self.policy.granted and self.policy.granted[worker].step <= number:
                del self.policy.granted[worker]
            return self._carry_out(self.policy.asked(worker, number + 1))
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

    def fate(self, worker: int, number: int) -> bool | None:
        """Does this part count? None: it was not seen yet."""
        known, used = self._fates.get(worker, (-1, False))
        return used if number <= known else None

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
                    self._fates[part.worker] = (part.step, True)
                    self._each(part, lambda pieces, n, worker=part.worker: pieces.hold(n, worker))
                case Drop(part):
                    self.dropped += 1
                    self._used[part.worker] = False
                    self._fates[part.worker] = (part.step, False)
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
        # the last one stays: all may have been answered, and one not have heard it. All before it are made on every server, since its
        # parts were computed on what those made
        oldest = min(*self._knows.values(), self.policy.version - 1)
        self._log = [entry for entry in self._log if entry.version >= oldest]
        return Answer(worker, self.policy.version, log, self._used.pop(worker, None))

    # -- a copy of it ----------------------------------------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """All that was decided, for a copy. Who waits for an answer asks its successor again."""
        policy = self.policy
        here = [
            [
                p.worker,
                p.step,
                p.version,
                p.count,
                [list(x) for x in self._pieces.get((p.worker, p.step), ())],
            ]
            for p in policy.here
        ]
        return {
            "members": sorted(policy.members), "backup": policy.backup, "aggregate": policy.aggregate, "version": policy.version,
            "here": here, "granted": [[g.worker, g.step, g.version] for g in policy.granted.values()],
            "log": [entry.plain() for entry in self._log], "knows": [list(pair) for pair in self._knows.items()],
            "fates": [[worker, *fate] for worker, fate in self._fates.items()], "dropped": self.dropped,
            "samples": [list(pair) for pair in self.samples.items()],
        }  # fmt: skip

    @classmethod
    def read(
        cls, told: Mapping[str, Any], find: Callable[[int, int], Pieces | None], more: Callable[[], bool]
    ) -> Decider:
        """What plain() gave goes on here, with the pieces that `find` knows."""
        members = [int(worker) for worker in told["members"]]
        made = cls(members, int(told["backup"]), int(told["aggregate"]), find, more)
        policy = made.policy
        policy.version = policy.safe = int(told["version"])
        for worker, number, version, count, pieces in told["here"]:
            policy.here.append(Part(int(worker), int(number), int(version), int(count)))
            made._pieces[int(worker), int(number)] = tuple((int(f), int(e), int(n)) for f, e, n in pieces)
        for worker, number, version in told["granted"]:
            policy.granted[int(worker)] = Grant(
                int(worker), int(number), int(version), "as it was granted before"
            )
        for version, parts, lead in told["log"]:
            of = tuple((int(w), int(n), int(c)) for w, n, c in parts)
            made._log.append(Entry(int(version), of, int(lead)))
        made._knows = {int(worker): int(version) for worker, version in told["knows"]}
        made._fates = {int(worker): (int(number), bool(used)) for worker, number, used in told["fates"]}
        made.samples = {int(worker): int(count) for worker, count in told["samples"]}
        made.dropped = int(told["dropped"])
        return made
