"""Between whom is a link dead? Pure: out of the connections that every worker and server published, both ends by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.control.roster import Who
from echelon.elastic.views import View


@dataclass(frozen=True)
class Dead:
    """`who` gets no answer from `peer` (or `peer` none from it) at `address`, for `for_s` seconds."""

    who: Who
    peer: Who
    address: str
    for_s: float


def dead_links(views: Sequence[View], least_s: float) -> list[Dead]:
    """Links between processes that have been without an answer for `least_s`, the longest first, each pair once."""
    found: dict[tuple[Who, Who], Dead] = {}
    for view in views:
        for ends, for_s in view.links.items():
            local, _, remote = ends.partition(" ")
            peer = _owner(views, view.who, local, remote) if for_s >= least_s else None
            if peer is None:
                continue
            pair = (min(view.who, peer), max(view.who, peer))
            known = found.get(pair)
            if known is None or known.for_s < for_s:
                found[pair] = Dead(view.who, peer, _address(remote), for_s)
    return sorted(found.values(), key=lambda dead: (-dead.for_s, dead.who))


def told(dead: Sequence[Dead], views: Sequence[View]) -> str:
    """The reason in words, for the first of them."""
    who = {view.who: f"{view.who} on {view.host} (pid {view.pid})" for view in views}
    first = dead[0]
    more = [f"{link.who} and {link.peer}" for link in dead[1:4]]
    also = f"; so it is between {', '.join(more)}" if more else ""
    return (
        f"{who[first.who]} gets no answer from {who[first.peer]} at {first.address} since {first.for_s:.0f} s, while both "
        f"reach the coordinator: the link between them is dead, or a firewall drops their packets{also}"
    )


def _owner(views: Sequence[View], me: Who, local: str, remote: str) -> Who | None:
    """Who holds the other end; if nobody said so, the only one at that address."""
    for view in views:
        if view.who != me and f"{remote} {local}" in view.links:
            return view.who
    there = {
        view.who
        for view in views
        for ends in view.links
        if _address(ends.partition(" ")[0]) == _address(remote)
    } - {me}
    return there.pop() if len(there) == 1 else None


def _address(end: str) -> str:
    return end.rpartition(":")[0]
