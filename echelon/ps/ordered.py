"""sync and bounded: update s is the mean of all members' parts of global batch s, applied in order.

A worker may compute step s on parameters of version s - staleness or later; sync is staleness 0. Who is a member changes
with a term: a member that is lost halts the policy; `regroup` names the members, goes back to the version that all servers
have, and everything from there on is computed again, dealt anew.
"""

from __future__ import annotations

from collections.abc import Mapping

from echelon.ps.decisions import (
    Accept,
    Apply,
    Decision,
    Drop,
    DropKind,
    Grant,
    Halt,
    Hold,
    Mean,
    Part,
    Rollback,
    Wait,
    divisor,
)


class Ordered:
    """See policy.Policy. `kept` is how many updates may be applied here that some server has not completed: as many
    earlier versions of its ranges must a server keep."""

    alone = True

    def __init__(
        self,
        members: Mapping[int, int],
        *,
        staleness: int = 0,
        term: int = 0,
        version: int = 0,
        kept: int = 1,
    ) -> None:
        self.members = dict(members)
        self.staleness = staleness
        self.term = term
        self.version = version
        self.safe = version
        """Every server has this version."""
        self.kept = kept
        self.halted = ""
        self._parts: dict[int, dict[int, Part]] = {}
        self._asking: dict[int, int] = {}

    def arrived(self, part: Part) -> list[Decision]:
        refused = self._refused(part)
        if refused:
            return [Drop(part, *refused)]
        here = self._parts.setdefault(part.step, {})
        here[part.worker] = part
        if part.step > self.version:
            return [Hold(part, f"update {self.version} comes before {part.step}")]
        return [Accept(part, f"{len(here)} of {len(self.members)} parts of step {part.step}"), *self._go_on()]

    def _refused(self, part: Part) -> tuple[DropKind, str] | None:
        """Why this part is of no use, in the order in which it matters."""
        if part.term != self.term:
            return "term", f"of term {part.term}, this is term {self.term}"
        if part.worker not in self.members:
            return "stranger", f"worker {part.worker} is not in term {self.term}"
        if part.incarnation != self.members[part.worker]:
            expected = self.members[part.worker]
            return "incarnation", f"from incarnation {part.incarnation}, incarnation {expected} is awaited"
        if self.halted:
            return "term", f"{self.halted}: step {part.step} is computed again in the next term"
        if part.step < self.version or part.worker in self._parts.get(part.step, {}):
            return "duplicate", f"step {part.step} has its part of worker {part.worker}"
        if part.version < part.step - self.staleness:
            oldest = part.step - self.staleness
            return (
                "stale",
                f"step {part.step} was computed on version {part.version}, {oldest} is the oldest allowed",
            )
        if part.version > min(self.version, part.step):
            return (
                "ahead",
                f"step {part.step} was computed on version {part.version}, here is {self.version}",
            )
        return None

    def asked(self, worker: int, step: int) -> list[Decision]:
        self._asking[worker] = step
        return self._answers(worker) or [self._wait(worker, step)]

    def joined(self, worker: int, incarnation: int) -> list[Decision]:
        if self.members.get(worker) == incarnation:
            return []
        return self._halt(f"worker {worker} came (incarnation {incarnation})")

    def lost(self, worker: int, reason: str = "lost") -> list[Decision]:
        self._asking.pop(worker, None)
        if worker not in self.members:
            return []
        return self._halt(f"worker {worker} {reason}")

    def regroup(self, term: int, members: Mapping[int, int], version: int) -> list[Decision]:
        if term <= self.term:
            return []
        if not self.safe <= version <= self.version:
            raise ValueError(
                f"term {term} agrees on version {version}, here are {self.safe} to {self.version}"
            )
        undone = self.version > version or bool(self._parts)
        reason = f"{self.halted or 'new members'}: term {term} goes on from version {version}"
        self.term, self.members = term, dict(members)
        self.version = self.safe = version
        self.halted = ""
        self._parts.clear()
        self._asking.clear()
        return [Rollback(version, reason)] if undone else []

    def committed(self, version: int) -> list[Decision]:
        self.safe = max(self.safe, min(version, self.version))
        return self._go_on()

    def may_begin(self, step: int) -> str:
        """Empty if parameters of the version here are new enough for `step`, else what is missing."""
        oldest = step - self.staleness
        if self.version >= oldest:
            return ""
        allowed = f", {self.staleness} behind is allowed" if self.staleness else ""
        return f"step {step} needs version {oldest}, here is {self.version}{allowed}"

    def missing(self) -> tuple[int, ...]:
        """Members whose part of the next update is not here."""
        return tuple(sorted(self.members.keys() - self._parts.get(self.version, {}).keys()))

    def _halt(self, reason: str) -> list[Decision]:
        if self.halted:
            return []
        self.halted = reason
        return [Halt(reason)]

    def _go_on(self) -> list[Decision]:
        """Applies what is complete, then answers who waited."""
        done: list[Decision] = []
        while (
            not self.halted and self.members and not self.missing() and self.version - self.safe < self.kept
        ):
            here = self._parts.pop(self.version)
            parts = tuple(here[rank] for rank in sorted(here))
            reason = f"all {len(parts)} parts of step {self.version} are here"
            done.append(Apply(self.version, parts, divisor(parts), Mean(), reason))
            self.version += 1
        if done:
            done += [grant for worker in sorted(self._asking) for grant in self._answers(worker)]
        return done

    def _answers(self, worker: int) -> list[Decision]:
        step = self._asking[worker]
        if self.halted or worker not in self.members or self.may_begin(step):
            return []
        del self._asking[worker]
        if step < self.version:  # a worker that came again and does not know how far the others are
            return [
                Grant(worker, self.version, self.version, f"step {step} is applied, {self.version} is next")
            ]
        behind = step - self.version
        return [Grant(worker, step, self.version, f"{behind} behind, {self.staleness} allowed")]

    def _wait(self, worker: int, step: int) -> Wait:
        if self.halted or worker not in self.members:
            return Wait(worker, step, f"{self.halted or 'not a member'}: the next term decides")
        return Wait(worker, step, self.may_begin(step), self.missing())
