"""Where the first host listens: what --listen means, and the socket. All of it is checked before anything starts."""

from __future__ import annotations

import errno
import ipaddress
import socket

from echelon.control import net
from echelon.errors import UsageError, WorldError

LOOPBACK = "127.0.0.1"


def parse(text: str) -> tuple[str, int]:
    """`10.0.0.1`, `10.0.0.1:29400`, `node1:29400`, `[fd00::1]:29400`, `fd00::1` -> (host, port); port 0: a free one."""
    host, port = text, ""
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise _not_an_address(text)
        port = rest[1:]
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if (
        not host
        or (text.endswith(":") and not text.endswith("::"))
        or (port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536))
    ):
        raise _not_an_address(text)
    return host, int(port or 0)


def choose(text: str | None, num_hosts: int) -> tuple[str, int]:
    """The address to bind, in numbers, and the port. With several hosts it must be one that others can reach."""
    if text is None:
        if num_hosts == 1:
            return LOOPBACK, 0
        there = net.addresses()
        if len(there) != 1:
            raise UsageError(
                f"--hosts {num_hosts}: on which address do the others reach this one?",
                remedy=f"Say it with --listen ADDR. This machine has: {net.spell_addresses()}.",
            )
        return there[0][1], 0
    host, port = parse(text)
    found = net.lookup(host)
    if num_hosts > 1:
        found = [address for address in found if not net.is_loopback(address)] or _only_loopback(host, found)
    for address in found:
        number = ipaddress.ip_address(address.partition("%")[0])
        if number.is_unspecified:
            raise UsageError(
                f"--listen {host} would mean every interface, and a run listens on one",
                remedy=f"Name it by its address: {net.spell_addresses()}.",
            )
        if number.is_link_local:
            raise UsageError(
                f"--listen {host}: a link-local address means something else on every interface, gloo cannot use it",
                remedy=f"Use another: {net.spell_addresses()}.",
            )
    return found[0], port


def open_socket(address: str, port: int) -> socket.socket:
    """The listening socket; WorldError that names who holds the port, or the addresses that there are."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=128)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise WorldError(
                f"port {port} of {address} is in use{_holder(port)}",
                remedy="Choose another port with --listen ADDR:PORT, or leave it out: the kernel finds a free one.",
            ) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise WorldError(
                f"--listen {address}: no interface of this machine holds that address",
                remedy=f"This machine has: {net.spell_addresses()}.",
            ) from None
        raise WorldError(f"cannot listen on {net.spell(address, port)}: {error.strerror}") from None


def _only_loopback(host: str, found: list[str]) -> list[str]:
    same = host if host in found else f"{host}, which is {', '.join(found)} here,"
    raise WorldError(
        f"--listen {same} is on interface lo: only this machine reaches it, the other hosts cannot",
        remedy=f"Listen where they can, with --listen ADDR. This machine has: {net.spell_addresses()}.",
    )


def _holder(port: int) -> str:
    """` by pid 12 (python)`, as far as this user may know."""
    import psutil

    try:
        for wire in psutil.net_connections("tcp"):
            if wire.status == psutil.CONN_LISTEN and wire.laddr and wire.laddr.port == port and wire.pid:
                return f" by pid {wire.pid} ({psutil.Process(wire.pid).name()})"
    except psutil.Error:
        pass
    return " by a process that this user may not see"


def _not_an_address(text: str) -> UsageError:
    return UsageError(
        f"--listen {text!r} is not an address",
        remedy="Write ADDR or ADDR:PORT, such as 10.0.0.1, 10.0.0.1:29400 or [fd00::1]:29400.",
    )
