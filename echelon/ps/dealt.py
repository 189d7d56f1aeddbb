"""What backup, async and local have in common: pieces of the epoch are dealt as workers ask, and a worker may come, go or
be slow without undoing a step. Each kind says when a worker may take pieces and when an update is complete.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from echelon.ps.decisions import Accept, Apply, Decision, Drop, Grant, Part, Rollback, Rule, Wait, divisor
from echelon.ps.ledger import Ledger


class Dealt(ABC):
    """See policy.Policy. A worker computes on one grant at a time; its part names the pieces that it was granted."""

    alone = False

    takes_late = False
    """Whether a part that was computed on an earlier version counts."""

    def __init__(
        self, members: Mapping[int, int], ledger: Ledger, *, most: int = 1, kept: int = 1, version: int = 0
    ) -> None:
        self.members = dict(members)
        self.ledger = ledger
        self.version = version
        self.term = 0
        self.most = most
        """Pieces that a worker takes at once."""
        self.safe = version
        """Every server has this version."""
        self.kept = kept
        """Updates that may be decided before every server has completed them; 0 for any number."""
        self.here: list[Part] = []
        """Parts of the next update, in order of arrival."""
        self.granted: dict[int, Grant] = {}
        """What each worker computes now."""
        self._asking: dict[int, int] = {}

    @abstractmethod
    def _may_take(self, worker: int) -> str:
        """Empty if this worker may compute another part now, else why not. Somebody has pieces left to deal."""

    @abstractmethod
    def _complete(self) -> str:
        """Why the parts that are here make an update now; empty if they do not."""

    @abstractmethod
    def _rule(self, parts: tuple[Part, ...]) -> Rule:
        """What the server does with them."""

    def arrived(self, part: Part) -> list[Decision]:
        refused = self._refused(part)
        if refused:
            return [refused]
        grant = self.granted.pop(part.worker)
        if part.version < self.version and not self.takes_late:
            back = self.ledger.give_back(grant.pieces)
            reason = (
                f"computed on version {part.version}, update {part.version} was complete without it: "
                f"here is {self.version}"
            )
            return [Drop(part, "stale", reason, back), *self._go_on()]
        self.ledger.hold(part.pieces)
        self.here.append(part)
        return [Accept(part, f"part {len(self.here)} of update {self.version}"), *self._go_on()]

    def _refused(self, part: Part) -> Drop | None:
        if part.worker not in self.members:
            return Drop(
                part, "stranger", f"worker {part.worker} is not a member: what it computed was dealt again"
            )
        if part.incarnation != self.members[part.worker]:
            expected = self.members[part.worker]
            reason = f"from incarnation {part.incarnation}, incarnation {expected} is awaited"
            return Drop(part, "incarnation", reason)
        grant = self.granted.get(part.worker)
        if grant is not None and (grant.pieces, grant.version) == (part.pieces, part.version):
            return None
        if any(p.pieces == part.pieces for p in self.here) or any(
            self.ledger.counted_in(piece) is not None for piece in part.pieces
        ):
            return Drop(part, "duplicate", f"pieces {list(part.pieces)} are counted already")
        reason = f"pieces {list(part.pieces)} on version {part.version} are not what worker {part.worker} was granted last"
        return Drop(part, "foreign", reason)

    def asked(self, worker: int, step: int) -> list[Decision]:
        if worker not in self.members:
            return [Wait(worker, step, "not a member")]
        before = self.granted.get(worker)
        if before is not None and step <= before.step:  # it begins again, on the newest parameters
            return [self._grant(worker, step, before.pieces, "asked again: the same pieces")]
        self._asking.setdefault(worker, step)
        answers = self._answers()
        mine = [a for a in answers if a.worker == worker]
        return [*answers, *([] if mine else [self._wait(worker)])]

    def joined(self, worker: int, incarnation: int) -> list[Decision]:
        if self.members.get(worker) == incarnation:
            return []
        self._remove(worker)
        self.members[worker] = incarnation
        return self._go_on()

    def lost(self, worker: int, reason: str = "lost") -> list[Decision]:
        """What it computes is dealt again; what it delivered stays."""
        self._remove(worker)
        return self._go_on()

    def _remove(self, worker: int) -> None:
        self.members.pop(worker, None)
        self._asking.pop(worker, None)
        grant = self.granted.pop(worker, None)
        if grant is not None:
            self.ledger.give_back(grant.pieces)

    def regroup(self, term: int, members: Mapping[int, int], version: int) -> list[Decision]:
        if term <= self.term:
            return []
        self.term = term
        decisions: list[Decision] = []
        if version != self.version:
            if not self.safe <= version <= self.version:
                raise ValueError(
                    f"term {term} agrees on version {version}, here are {self.safe} to {self.version}"
                )
            back = self.ledger.undo(version)
            self.here.clear()
            self.granted.clear()
            self._asking.clear()
            reason = f"term {term} goes on from version {version}, {self.version - version} updates and {len(back)} pieces again"
            self.version = version
            decisions.append(Rollback(version, reason))
        for worker in [w for w, incarnation in self.members.items() if members.get(w) != incarnation]:
            self._remove(worker)
        self.members = dict(members)
        return [*decisions, *self._go_on()]

    def committed(self, version: int) -> list[Decision]:
        self.safe = max(self.safe, version)
        self.ledger.settle(version)
        return self._go_on()

    def open(self, pieces: Iterable[int]) -> list[Decision]:
        """The next epoch begins: those who wait get their pieces."""
        self.ledger.open(pieces)
        return self._go_on()

    def _go_on(self) -> list[Decision]:
        """Applies what is complete, then answers who waited; the one may lead to the other."""
        done: list[Decision] = []
        while True:
            free = not self.kept or self.version - self.safe < self.kept
            reason = self._complete() if self.here and free else ""
            if reason:
                done.append(self._apply(reason))
            answers = self._answers()
            done += answers
            if not reason and not answers:
                return done

    def _apply(self, reason: str) -> Apply:
        parts = tuple(sorted(self.here, key=lambda part: part.worker))
        self.here = []
        for part in parts:
            self.ledger.count(part.pieces, self.version)
        update = Apply(self.version, parts, divisor(parts), self._rule(parts), reason)
        self.version += 1
        return update

    def _answers(self) -> list[Grant]:
        """Who asked first is answered first."""
        answers = []
        for worker in list(self._asking):
            if worker not in self.granted and self.ledger.waiting and not self._may_take(worker):
                step = self._asking.pop(worker)
                answers.append(self._grant(worker, step, self.ledger.deal(worker, self.most), "pieces wait"))
        return answers

    def _grant(self, worker: int, step: int, pieces: tuple[int, ...], reason: str) -> Grant:
        grant = self.granted[worker] = Grant(worker, step, self.version, reason, pieces)
        return grant

    def _wait(self, worker: int) -> Wait:
        why = self._may_take(worker)
        if worker in self.granted:
            why = f"its part of step {self.granted[worker].step} is not here yet"
        elif not self.ledger.waiting:
            why = "every piece of the epoch is dealt; what comes back is dealt again"
        missing = tuple(w for w in self.ledger.holders() if w != worker)
        return Wait(worker, self._asking[worker], why, missing)
