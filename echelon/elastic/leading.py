"""The coordinator's part in serving shards: it decides who leads, writes it down, and tells whoever asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from echelon.control.handshake import Identity
from echelon.control.roster import partner
from echelon.elastic import leads
from echelon.elastic.leads import Moved
from echelon.errors import UsageError, WorldError
from echelon.events import Event, ShardServed

ROLES = {
    "ps.lead": frozenset({"worker", "server", "supervisor", "cli"}),
    "ps.copied": frozenset({"server"}),
}
MAX_WAIT_S = 600.0


class Leading:
    """Lives in the coordinator's event loop."""

    def __init__(
        self, num_servers: int, note: Callable[[dict[str, Any]], None], say: Callable[[Event], None]
    ) -> None:
        self.leads = leads.first(num_servers)
        self._note, self._say = note, say
        self._changed = asyncio.Event()

    def methods(self) -> dict[str, Any]:
        return {"ps.lead": self.lead, "ps.copied": self.copied}

    async def lead(self, peer: Identity, shard: int, after: int, timeout_s: float) -> dict[str, Any]:
        """Who leads the shard since an epoch later than `after`; waits for one."""
        self._check(shard)
        try:
            async with asyncio.timeout(min(max(timeout_s, 0.0), MAX_WAIT_S)):
                while self.leads[shard].epoch <= after:
                    await self._changed.wait()
        except TimeoutError:
            raise WorldError(
                f"server {self.leads[shard].rank} does not answer, and it did not end: nobody takes its place",
                remedy="It may be stopped, or its host cut off.",
            ) from None
        found = self.leads[shard]
        if found.lost:
            raise WorldError(
                f"the parameters on server {found.rank} are lost: {found.lost}; what is left is the last checkpoint (--resume)"
            )
        return {"rank": found.rank, "epoch": found.epoch}

    async def copied(self, peer: Identity, shard: int, epoch: int, copied: bool) -> bool:
        """The leader tells whether its partner has a whole copy. False: it does not lead any more."""
        self._check(shard)
        found = leads.told(self.leads, shard, peer.rank, epoch, copied)
        if found is None:
            return False
        if found != self.leads:
            self._set(found)
            self._tell(shard, "")
        return True

    def fell(self, rank: int, reason: str) -> list[Moved]:
        """A server is gone."""
        before = self.leads
        found, moves = leads.fell(before, rank, reason)
        if found != before:
            self._set(found)
        moved = {move.shard for move in moves}
        for shard, lead in enumerate(found):
            if lead != before[shard] and not lead.lost:
                self._tell(shard, reason if shard in moved else "")
        return moves

    @property
    def whole(self) -> bool:
        """Somebody has every shard."""
        return not any(lead.lost for lead in self.leads)

    def record(self) -> dict[str, Any]:
        return leads.to_dict(self.leads)

    def restore(self, record: Mapping[str, Any]) -> None:
        self.leads = leads.read(record)

    def _set(self, found: tuple[leads.Lead, ...]) -> None:
        self._note(leads.to_dict(found))
        self.leads = found
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _tell(self, shard: int, moved: str) -> None:
        lead = self.leads[shard]
        other = partner(shard, lead.rank, len(self.leads))
        self._say(ShardServed(shard=shard, leader=lead.rank, partner=other, copied=lead.copied, moved=moved))

    def _check(self, shard: int) -> None:
        if not 0 <= shard < len(self.leads):
            raise UsageError(f"there is no shard {shard} of {len(self.leads)}")
