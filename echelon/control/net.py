"""Which address and interface of this machine face another one: chosen from the route, never from the host's name."""

from __future__ import annotations

import ipaddress
import socket

from echelon.errors import WorldError


def split(address: str) -> tuple[str, int]:
    """`127.0.0.1:8080` or `[::1]:8080` -> (host, port); WorldError for anything else."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise WorldError(
            f"{address!r} is not an address", remedy="Write HOST:PORT, for example 127.0.0.1:29400."
        )
    return host, int(port)


def spell(host: str, port: int) -> str:
    """(host, port) -> what `split` reads back."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """True for an address that only this machine can reach. A name is looked up; an unknown one is not loopback."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def local_address(host: str, port: int = 9) -> str:
    """The address of this machine from which `host` is reached. Asks the routing table; sends nothing."""
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        raise WorldError(
            f"the name {host!r} has no address: {error.strerror}",
            remedy="Give the address in numbers, or add the name to /etc/hosts on this machine.",
        ) from None
    with socket.socket(family, kind, proto) as probe:
        try:
            probe.connect(where)
        except OSError as error:
            raise WorldError(
                f"this machine has no route to {host}: {error.strerror}",
                remedy="Check the address, or name the interface with --interface.",
            ) from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The name of the interface that holds `address` (127.0.0.1 -> "lo"); WorldError when none does."""
    import psutil  # here, so that whoever only checks a frame does not pay for it

    wanted = ipaddress.ip_address(address.partition("%")[0])
    near = ""
    interfaces = psutil.net_if_addrs()
    for name, entries in interfaces.items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            held = ipaddress.ip_address(entry.address.partition("%")[0])
            if held == wanted:
                return str(name)
            if held.is_loopback and wanted.is_loopback and held.version == wanted.version:
                near = name
    if near:
        return near
    known = ", ".join(
        f"{n} {e.address}" for n, es in interfaces.items() for e in es if e.family == socket.AF_INET
    )
    raise WorldError(f"no interface of this machine holds {address}", remedy=f"It has: {known}.")


def interface_to(host: str) -> str:
    """The interface on the route to `host`."""
    return interface_of(local_address(host))


def addresses() -> list[tuple[str, str]]:
    """(interface, address) of this machine, as others may reach it: no loopback, no link-local; IPv4 first."""
    import psutil

    found = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                held = ipaddress.ip_address(entry.address.partition("%")[0])
                if not held.is_loopback and not held.is_link_local:
                    found.append((str(name), str(held)))
    return sorted(found, key=lambda pair: ":" in pair[1])


def spell_addresses() -> str:
    """`eth0 10.0.0.1, eth1 192.168.7.2`: for messages."""
    return ", ".join(f"{name} {address}" for name, address in addresses()) or "no address but loopback"


def address_on(interface: str, facing: str) -> str:
    """The address of `interface` in the family of the address `facing`; WorldError that lists what there is."""
    family = ipaddress.ip_address(facing.partition("%")[0]).version
    held = [address for name, address in addresses() if name == interface]
    for address in held:
        if ipaddress.ip_address(address).version == family:
            return address
    why = (
        f"holds no IPv{family} address"
        if held
        else "is not an interface of this machine that others can reach"
    )
    raise WorldError(
        f"--interface {interface}: it {why}, and the first host is at {facing}",
        remedy=f"This machine has: {spell_addresses()}.",
    )


def lookup(host: str) -> list[str]:
    """The addresses of a name (or of an address: itself), in the system's order; WorldError when there is none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise WorldError(
            f"the name {host!r} has no address (DNS): {getattr(error, 'strerror', error)}",
            remedy="Give the address in numbers, or add the name to /etc/hosts on this machine.",
        ) from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
