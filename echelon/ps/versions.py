"""A step is never torn: who has reported what, and what follows. Pure.

A part is whole when every server has it; an update is complete when every server applied it; until then each keeps the
version before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from echelon.ps.decisions import Part


class Arrivals:
    """Parts that some servers have. Told twice is told once."""

    def __init__(self, servers: Iterable[int]) -> None:
        self.servers = frozenset(servers)
        self._have: dict[Part, set[int]] = {}

    def report(self, server: int, part: Part) -> bool:
        """True once: when the last server has it."""
        if server not in self.servers:
            raise ValueError(f"server {server} is not one of {sorted(self.servers)}")
        have = self._have.setdefault(part, set())
        have.add(server)
        if have != self.servers:
            return False
        del self._have[part]
        return True

    def forget(self, worker: int, before: int) -> list[Part]:
        """What came from this worker's incarnations below `before` and is not whole: servers drop it."""
        gone = [p for p in self._have if p.worker == worker and p.incarnation < before]
        for part in gone:
            del self._have[part]
        return gone


def agreed(applied: Mapping[int, int]) -> int:
    """The version that all ranges can have, from each server's own: an update is complete if every server applied it, even
    if none of them heard of it; every other goes back."""
    return min(applied.values())


class Completion:
    """Which servers applied which update, in this term: a report that was under way while ranges went back is void."""

    def __init__(self, servers: Iterable[int], version: int = 0, term: int = 0) -> None:
        self.term = term
        self._applied = dict.fromkeys(servers, version)

    def report(self, server: int, version: int, term: int = 0) -> int:
        """This server has `version` now; gives the version that every server has."""
        if term == self.term:
            self._applied[server] = max(self._applied[server], version)
        return self.committed

    @property
    def committed(self) -> int:
        return agreed(self._applied)

    def behind(self) -> tuple[int, ...]:
        """Servers that others wait for."""
        most = max(self._applied.values())
        return tuple(sorted(s for s, version in self._applied.items() if version < most))

    def rollback(self, version: int, term: int) -> None:
        """A new term begins, and every server has this version in it."""
        self.term = term
        self._applied = dict.fromkeys(self._applied, version)


class Kept:
    """The versions of its ranges that one server holds: the newest, and those that it may have to go back to."""

    def __init__(self, version: int = 0) -> None:
        self.versions: tuple[int, ...] = (version,)

    @property
    def newest(self) -> int:
        return self.versions[-1]

    def apply(self, step: int) -> None:
        """Version `step` stays beside the one that update `step` makes."""
        if step != self.newest:
            raise ValueError(f"update {step} on version {self.newest}: it would be lost or counted twice")
        self.versions = (*self.versions, step + 1)

    def commit(self, version: int) -> tuple[int, ...]:
        """Every server has `version`: those before it may be freed."""
        if version > self.newest:
            raise ValueError(f"version {version} is complete everywhere, but here is {self.newest}")
        freed = tuple(v for v in self.versions if v < version)
        self.versions = self.versions[len(freed) :]
        return freed

    def rollback(self, version: int) -> tuple[int, ...]:
        """Back to `version`: the later ones may be freed."""
        if version not in self.versions:
            raise ValueError(f"version {version} is not kept: here are {self.versions}")
        at = self.versions.index(version) + 1
        gone, self.versions = self.versions[at:], self.versions[:at]
        return gone
