"""Addresses, routes and interfaces of this machine."""

from __future__ import annotations

import pytest

from echelon.control import net
from echelon.errors import WorldError


def test_the_way_to_loopback_is_loopback():
    assert net.local_address("127.0.0.1") == "127.0.0.1"
    assert net.interface_of("127.0.0.1") == "lo"
    assert net.interface_of("127.0.0.77") == "lo"  # all of 127/8 is
    assert net.interface_to("127.0.0.1") == "lo"


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
    ],
)
def test_loopback_is_told_from_the_rest(address, loopback):
    assert net.is_loopback(address) is loopback


@pytest.mark.parametrize("pair", [("127.0.0.1", 80), ("::1", 65535), ("some-host", 1)])
def test_an_address_is_spelled_and_read_back(pair):
    assert net.split(net.spell(*pair)) == pair


@pytest.mark.parametrize(
    "text", ["", "127.0.0.1", ":80", "host:", "host:x", "host:0", "host:65536", "host:-1", "host:²"]
)
def test_what_is_no_address_is_said(text):
    with pytest.raises(WorldError, match="is not an address"):
        net.split(text)


def test_an_address_of_another_machine_has_no_interface_here():
    with pytest.raises(WorldError, match=r"no interface .* 203\.0\.113\.5") as caught:
        net.interface_of("203.0.113.5")
    assert "lo 127.0.0.1" in caught.value.remedy


def test_a_name_that_does_not_exist_is_said_with_a_remedy():
    with pytest.raises(WorldError, match="has no address") as caught:
        net.local_address("no-such-host.invalid")
    assert "numbers" in caught.value.remedy
