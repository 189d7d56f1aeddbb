"""Memory that every server on this host shares: what a worker puts there is pushed to any of them without a copy."""

from __future__ import annotations

from torch import Tensor

from echelon.comm.group import Group
from echelon.errors import LinkLost
from echelon.ps.link import INLINE_BYTES, Link
from echelon.ps.route import Route
from echelon.ps.worker import Servers


class Shared:
    """Gives buffers as a Group does, for gradients in the CPU's memory; where no server is on this host, the group's own."""

    def __init__(self, servers: Servers, group: Group) -> None:
        self.group, self.rank = group, group.rank
        here = [way for way in servers.ways if way.local]
        self._owner = here[0] if here else None
        if here:
            first, *others = (way.link if isinstance(way, Route) else way for way in here)
            first.share_with(others)
        self._given: list[tuple[Link, Tensor]] = []

    def buffer(self, nbytes: int) -> Tensor:
        """See Group.buffer. What is small, or on another device, is the group's."""
        owner = self._owner
        if owner is None or nbytes <= INLINE_BYTES or self.group.buffer(0).device.type != "cpu":
            return self.group.buffer(nbytes)
        link = owner.link if isinstance(owner, Route) else owner
        try:
            buffer = link.buffer(nbytes).zero_()
        except LinkLost:  # whoever takes its place is found with the next call
            return self.group.buffer(nbytes)
        self._given.append((link, buffer))
        return buffer

    def turn(self) -> list[tuple[Link, Tensor]]:
        """What was given so far: to be given to free() once nothing uses it."""
        given, self._given = self._given, []
        return given

    def free(self, given: list[tuple[Link, Tensor]]) -> None:
        for link, buffer in given:
            link.release(buffer)
