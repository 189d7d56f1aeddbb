"""Hosts on one machine: network namespaces on a bridge, each with a name, addresses and an /etc/hosts of its own.

The bridge lies in a namespace too, so nothing of the machine's own network is touched. Whoever uses them ends their
processes first; `close` ends by pid what is still inside, and removes everything.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import needs

IPV4, IPV6 = "10.77.0.{}", "fd77::{}"


@dataclass
class NetHost:
    """One host. `command` runs there under its own hostname."""

    space: str
    name: str
    ipv4: str
    ipv6: str
    rules: list[tuple[str, ...]] = field(default_factory=list)

    def command(self, *argv: str) -> list[str]:
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.name} && exec "$@"', "sh"]
        return ["ip", "netns", "exec", self.space, *named, *argv]

    def iptables(self, *rule: str, family: str = "iptables") -> None:
        """Adds a rule inside the host: `iptables("-A", "INPUT", "-j", "DROP")`."""
        sh("ip", "netns", "exec", self.space, family, *rule)

    def vanish(self) -> None:
        """From now on no packet comes or goes, and nobody is told."""
        for family in ("iptables", "ip6tables"):
            for chain in ("INPUT", "OUTPUT"):
                self.iptables(
                    "-I", chain, "!", "-i" if chain == "INPUT" else "-o", "lo", "-j", "DROP", family=family
                )

    def cut(self, other: NetHost) -> None:
        """From now on no packet goes to `other` or comes from it, and nobody is told. Others are reached as before."""
        for family, address in (("iptables", other.ipv4), ("ip6tables", other.ipv6)):
            if address:
                self.iptables("-I", "INPUT", "-s", address, "-j", "DROP", family=family)
                self.iptables("-I", "OUTPUT", "-d", address, "-j", "DROP", family=family)

    def mend(self) -> None:
        """No rule is left."""
        for family in ("iptables", "ip6tables"):
            self.iptables("-F", family=family)


class Network:
    """`count` hosts h0, h1, … on one bridge; those in `ipv6_only` have no IPv4 address."""

    def __init__(self, count: int, ipv6_only: tuple[int, ...] = (), second_network: bool = False) -> None:
        self.tag = f"ech{os.getpid() % 100000}x{time.monotonic_ns() % 1000}"
        self.switch = f"{self.tag}sw"
        self.hosts = [
            NetHost(
                f"{self.tag}h{i}", f"h{i}", "" if i in ipv6_only else IPV4.format(i + 1), IPV6.format(i + 1)
            )
            for i in range(count)
        ]
        try:
            self._make(second_network)
        except BaseException:
            self.close()
            raise

    def _make(self, second_network: bool) -> None:
        sh("ip", "netns", "add", self.switch)
        inside = ("ip", "-n", self.switch)
        sh(*inside, "link", "add", "br0", "type", "bridge")
        sh(*inside, "link", "set", "br0", "up")
        lines = ["127.0.0.1 localhost"]
        for host in self.hosts:
            lines += [f"{address} {host.name}" for address in (host.ipv4, host.ipv6) if address]
        for number, host in enumerate(self.hosts):
            sh("ip", "netns", "add", host.space)
            there = ("ip", "-n", host.space)
            sh(*there, "link", "set", "lo", "up")
            sh(
                *inside,
                "link",
                "add",
                f"p{number}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                host.space,
            )
            sh(*inside, "link", "set", f"p{number}", "master", "br0", "up")
            no_wait = "for name in all eth0; do echo 0 > /proc/sys/net/ipv6/conf/$name/accept_dad; done"
            sh("ip", "netns", "exec", host.space, "sh", "-ec", no_wait)
            sh(*there, "link", "set", "eth0", "up")
            if host.ipv4:
                sh(*there, "addr", "add", f"{host.ipv4}/24", "dev", "eth0")
            sh(*there, "-6", "addr", "add", f"{host.ipv6}/64", "dev", "eth0", "nodad")
            if second_network:  # an interface that leads nowhere
                sh(*there, "link", "add", "eth9", "type", "veth", "peer", "name", "eth9x")
                sh(*there, "link", "set", "eth9x", "up")
                sh(*there, "link", "set", "eth9", "up")
                sh(*there, "addr", "add", f"10.99.{number}.1/24", "dev", "eth9")
            folder = Path("/etc/netns") / host.space
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text("\n".join(lines) + "\n")

    def names(self, host: NetHost, text: str) -> None:
        """Another /etc/hosts for one host."""
        (Path("/etc/netns") / host.space / "hosts").write_text(text)

    def pids(self) -> list[int]:
        """Processes that are still inside."""
        found = []
        for space in [*(host.space for host in self.hosts), self.switch]:
            done = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
            found += [int(pid) for pid in done.stdout.split()]
        return found

    def close(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for space in [*(host.space for host in self.hosts), self.switch]:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)


@contextlib.contextmanager
def network(count: int, **options: Any) -> Iterator[Network]:
    """Makes hosts, and removes them whatever happens."""
    needs.use("hosts")
    made = Network(count, **options)
    try:
        yield made
    finally:
        made.close()


def sh(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
