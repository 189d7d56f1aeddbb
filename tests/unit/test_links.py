"""Connections out of /proc, and the ends of a dead link in words."""

from __future__ import annotations

import socket

from echelon.activity import Wait
from echelon.clock import FakeClock
from echelon.control.links import MAX_LINKS, Links
from echelon.control.roster import Who
from echelon.elastic.deadlink import Dead, dead_links, told
from echelon.elastic.views import View

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def row(local="0200000A:9C40", remote="0300000A:1388", state="01", resent=0, probes=0, inode=77):
    return f"   0: {local} {remote} {state} 00000010:00000000 01:00000014 {resent:08X}     0 {probes:8d} {inode} 2 0\n"


def test_a_connection_is_unanswered_since_it_was_first_seen_so():
    clock = FakeClock(100.0)
    links = Links(clock)
    assert links.judge([HEAD + row()], {"77"}) == {"10.0.0.2:40000 10.0.0.3:5000": 0.0}
    links.judge([HEAD + row(resent=3)], {"77"})
    clock.advance(6.0)
    assert links.judge([HEAD + row(resent=6)], {"77"}) == {"10.0.0.2:40000 10.0.0.3:5000": 6.0}
    links.judge([HEAD + row()], {"77"})  # it answered
    clock.advance(6.0)
    assert links.judge([HEAD + row(probes=4)], {"77"}) == {"10.0.0.2:40000 10.0.0.3:5000": 0.0}


def test_only_this_process_s_connections_to_other_machines_count():
    text = (
        HEAD + row(inode=1, resent=9) + row(state="0A") + row(local="0100007F:0050", remote="0100007F:0051")
    )
    assert Links().judge([text], {"77"}) == {}


def test_ipv6_and_mapped_addresses():
    v6 = row(local="000077FD000000000000000002000000:0001", remote="000077FD000000000000000003000000:0002")
    mapped = row(
        local="0000000000000000FFFF00000200000A:0003", remote="0000000000000000FFFF00000300000A:0004"
    )
    assert set(Links().judge(["", HEAD + v6 + mapped], {"77"})) == {
        "fd77::2:1 fd77::3:2",
        "10.0.0.2:3 10.0.0.3:4",
    }


def test_the_unanswered_come_first_when_there_are_too_many():
    rows = "".join(row(remote=f"0300000A:{port:04X}") for port in range(1, 200))
    found = Links().judge([HEAD + rows + row(resent=5)], {"77"})
    assert len(found) == MAX_LINKS
    assert next(iter(found)) == "10.0.0.2:40000 10.0.0.3:5000"


def test_a_real_connection_over_loopback_is_left_out_and_costs_no_socket():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as wire,
    ):
        assert all("127.0.0.1" not in ends for ends in Links().read())
        wire.getpeername()


def test_each_pair_is_told_once_with_the_longest_first():
    def view(rank, **links):
        wait = Wait("gradients", 3, "all_reduce", 8, 12.0)
        spelled = {
            f"10.0.0.{rank}:{rank} 10.0.0.{int(peer[1:])}:{int(peer[1:])}": s for peer, s in links.items()
        }
        return View(rank=rank, host=f"h{rank}", pid=10 + rank, wait=wait, links=spelled)

    views = [view(1, r2=7.0, r3=9.0), view(2, r1=8.0), view(3, r1=1.0)]
    found = dead_links(views, 5.0)
    assert found == [
        Dead(Who("worker", 1), Who("worker", 3), "10.0.0.3", 9.0),
        Dead(Who("worker", 2), Who("worker", 1), "10.0.0.1", 8.0),
    ]
    assert told(found, views) == (
        "worker 1 on h1 (pid 11) gets no answer from worker 3 on h3 (pid 13) at 10.0.0.3 since 9 s, while both reach the "
        "coordinator: the link between them is dead, or a firewall drops their packets; so it is between worker 2 and worker 1"
    )
