"""Who is in the run, as engines may ask it: the boundary between them and the control wire."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

JOINED, LEFT, FAILED, DEAD = "joined", "left", "failed", "dead"
"""States of a rank: at work; its script came to its end; its script raised; its process ended without a word."""


WORKER, SERVER = "worker", "server"

OVER = "run/over"
"""Key of the run's table: there once the run needs its servers no more. The first host's supervisor sets it."""


class Who(NamedTuple):
    """A process that has a seat. Ranks count within a role: worker 0 and server 0 are two."""

    role: str
    rank: int

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"

    @property
    def key(self) -> str:
        """For a table whose keys are texts: a worker's is its rank, "0", a server's "server-0"."""
        return f"{self.role}-{self.rank}" if self.role == SERVER else str(self.rank)


def partner(shard: int, rank: int, num_servers: int) -> int:
    """Shard s of the servers' parameters lies on servers s and s + 1: the one of the two that is not `rank`."""
    return (shard + 1) % num_servers if rank == shard else shard


class Roster(Protocol):
    """What a rank knows of the others. Reading `term` and `stop_requested` costs nothing and never blocks."""

    term: int
    """Grows with every change of membership after the run has formed; as of the last beat (0.5 s old at most)."""

    stop_requested: bool
    """True once somebody asked the run to end at a common step."""

    def roster(self) -> dict[int, dict[str, Any]]:
        """Each worker that ever joined: {"state", "step", "host", "pid", "incarnation", "term"}, the last being that of its last change.
        Asks the coordinator; blocks up to 10 s."""

    def servers(self) -> dict[int, dict[str, Any]]:
        """The same of each parameter server, with its "incarnation": a server that was started again has a higher one."""
