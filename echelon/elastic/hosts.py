"""The hosts of a run: their order, their share of the workers and servers, and which of them is lost. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from echelon.control.roster import SERVER, Who
from echelon.errors import WorldError

SILENT_S = 10.0
"""A host whose supervisor says nothing for so long is lost. Supervisors beat every half second."""

HUNG_UP_S = 1.0
"""A supervisor whose last connection ended gets so long to make a new one: it was killed, or the wire broke."""


@dataclass(frozen=True)
class Host:
    """A host that came. `key` tells two of one name apart; 0 is the first host's."""

    key: int
    name: str
    address: str
    asked: int | None = None
    """Workers that it wants to run (--workers of join), None: its even share."""

    probe_port: int = 0
    """Where the others can see, before anything starts, whether they reach it."""

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass(frozen=True)
class Seat:
    """A host's place in a run that formed: workers first_rank … first_rank + num_workers - 1 run there, servers likewise."""

    index: int
    key: int
    name: str
    address: str
    first_rank: int
    num_workers: int
    first_server: int = 0
    num_servers: int = 0

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_workers)

    @property
    def servers(self) -> range:
        return range(self.first_server, self.first_server + self.num_servers)

    def holds(self, who: Who) -> bool:
        return who.rank in (self.servers if who.role == SERVER else self.ranks)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def order(hosts: Sequence[Host]) -> list[Host]:
    """The first host, then the others by address: numbers, so that 10.0.0.9 comes before 10.0.0.10."""

    def by(host: Host) -> tuple[bool, int, int, str, int]:
        address = ipaddress.ip_address(host.address.partition("%")[0])
        return host.key != 0, address.version, int(address), host.name, host.key

    return sorted(hosts, key=by)


def deal(total: int, asked: Sequence[int | None], num_servers: int = 0) -> list[int]:
    """Workers for each host, in order: what a host asked for, the rest evenly over those who did not say, earlier
    ones first. A host that asked for none is there for servers. WorldError when that cannot be."""
    idle = sum(1 for number in asked if number == 0)
    if idle > num_servers:
        raise WorldError(
            f"join --workers 0 was said by {idle} host{'s' * (idle != 1)}, and there {'is' if num_servers == 1 else 'are'} "
            f"{num_servers} server{'s' * (num_servers != 1)} to run there",
            remedy="A host without workers is for servers: give `echelon run --servers` at least one for each.",
        )
    said = sum(number for number in asked if number is not None)
    silent = sum(1 for number in asked if number is None)
    rest = total - said
    sums = " + ".join(str(number) for number in asked if number is not None)
    if rest < silent or (silent == 0 and rest != 0):
        left = (
            f"{silent} more host{'s' * (silent != 1)} need at least one each"
            if silent
            else "no host is left for others"
        )
        raise WorldError(
            f"{total} workers cannot be dealt: join --workers says {sums or 0} together, and {left}",
            remedy=f"Give `echelon run --workers` the total ({said + silent} or more here), and `echelon join --workers` a part of it.",
        )
    shares, given = [], 0
    for number in asked:
        if number is None:
            each, over = divmod(rest, silent)
            number = each + (given < over)
            given += 1
        shares.append(number)
    return shares


def deal_servers(total: int, workers: Sequence[int]) -> list[int]:
    """Servers for each host, in order, by its workers: evenly over the hosts without workers, whose links are free; over
    all if there is none. Earlier ones first; a host may have none."""
    takers = [index for index, number in enumerate(workers) if number == 0] or list(range(len(workers)))
    each, over = divmod(total, len(takers))
    shares = [0] * len(workers)
    for turn, index in enumerate(takers):
        shares[index] = each + (turn < over)
    return shares


def seats(total: int, hosts: Sequence[Host], num_servers: int = 0) -> list[Seat]:
    """Where everybody runs: hosts in order, ranks without gaps."""
    ordered, made, first, first_server = order(hosts), [], 0, 0
    shares = deal(total, [host.asked for host in ordered], num_servers)
    for index, (host, share, servers) in enumerate(
        zip(ordered, shares, deal_servers(num_servers, shares), strict=True)
    ):
        made.append(Seat(index, host.key, host.name, host.address, first, share, first_server, servers))
        first, first_server = first + share, first_server + servers
    return made


@dataclass
class Signs:
    """What is known of one host's supervisor: when it last beat, how many connections it has, since when none."""

    seen: float
    connections: int = 0
    hung_up: float | None = None


def lost(now: float, signs: Mapping[int, Signs]) -> dict[int, str]:
    """The hosts that are lost now, each with the reason."""
    gone: dict[int, str] = {}
    for index, sign in signs.items():
        if sign.hung_up is not None and now - sign.hung_up >= HUNG_UP_S:
            gone[index] = "its supervisor ended without a word"
        elif now - sign.seen >= SILENT_S:
            gone[index] = f"no sign of life for {SILENT_S:g} s: the machine stopped, or its network is cut"
    return gone
