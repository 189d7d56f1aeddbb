"""How ranks of several hosts are connected: who is let in, and who keeps nobody waiting."""

from __future__ import annotations

import os
import resource
import socket
import threading

import pytest

from echelon.clock import Deadline
from echelon.comm import hosts, mesh
from echelon.comm.handover import Seat
from echelon.control import frames, greet, net
from echelon.control.handshake import Identity
from echelon.errors import AuthError, WorldError

SOON_S = 30.0


class Table:
    """A meeting within one process."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        with self.changed:
            self.entries[key] = value
            self.changed.notify_all()

    def get(self, key: str, deadline: Deadline) -> bytes:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.entries, deadline.left_s):
                raise WorldError(f"nobody said {key}")
            return self.entries[key]


def connect(table, rank, size, results, token="token", term=1, seconds=SOON_S):
    try:
        seat = Seat(rank, size, token, "run", term)
        results[rank] = mesh.connect(table, seat, "g", "127.0.0.1", Deadline.after(seconds))
    except Exception as error:
        results[rank] = error


def start(table, rank, size, results, **options):
    thread = threading.Thread(target=connect, args=(table, rank, size, results), kwargs=options)
    thread.start()
    return thread


def where(table, rank):
    return net.split(table.get(f"tcp/g/{rank}", Deadline.after(SOON_S)).decode())


def close(results):
    for links in results.values():
        if not isinstance(links, Exception):
            for fds in links:
                for fd in fds:
                    os.close(fd)


def test_every_pair_is_connected_by_as_many_streams_as_the_lanes_need():
    table, results = Table(), {}
    threads = [start(table, rank, 3, results) for rank in (2, 0, 1)]
    for thread in threads:
        thread.join(SOON_S)
    num = 2 + mesh.NUM_LANES * mesh.STREAMS
    for rank in range(3):
        assert [len(fds) for fds in results[rank]] == [0 if peer == rank else num for peer in range(3)]
    for i in range(num):  # stream i of one is stream i of the other
        os.write(results[0][2][i], b"%d" % i)
        assert os.read(results[2][0][i], 10) == b"%d" % i
    close(results)


@pytest.mark.case("TCP: strangers are dropped without harm")
def test_silence_garbage_and_wrong_tokens_are_dropped_while_the_others_go_on():
    table, results = Table(), {}
    first = start(table, 0, 2, results)
    address = where(table, 0)
    strangers = [socket.create_connection(address) for _ in range(20)]
    for stranger in strangers[10:]:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    for token in ("wrong", ""):
        with socket.create_connection(address) as wire, pytest.raises((AuthError, OSError)):
            greet.greet(wire, token, Identity("run", "worker", 1, 1), Deadline.after(SOON_S))
    second = start(table, 1, 2, results)
    first.join(SOON_S)
    second.join(SOON_S)
    assert all(isinstance(links, list) for links in results.values()), results
    close(results)
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(
    "said",
    [
        {"group": "g", "term": 1, "stream": 0},
        {"group": "other", "term": 2, "stream": 0},
        {"group": "g", "term": 2, "stream": 99},
        {"group": "g", "term": 2, "stream": "0"},
        [],
    ],
    ids=["an older term", "another group", "no such stream", "not a number", "no words"],
)
def test_who_knows_the_token_but_does_not_belong_here_is_dropped(said):
    table, results = Table(), {}
    first = start(table, 0, 2, results, term=2)
    with socket.create_connection(where(table, 0)) as wire:
        soon = Deadline.after(SOON_S)
        session = greet.greet(wire, "token", Identity("run", "worker", 1, 1), soon)
        greet.send(wire, frames.Sealer(session.from_client).seal(said), soon)
        with pytest.raises(ConnectionError):
            greet.exactly(wire, 1, soon)
    second = start(table, 1, 2, results, term=2)
    first.join(SOON_S)
    second.join(SOON_S)
    assert all(isinstance(links, list) for links in results.values()), results
    close(results)


def test_who_does_not_come_is_named_at_the_deadline():
    table, results = Table(), {}
    start(table, 0, 3, results, seconds=0.5).join(SOON_S)
    assert "ranks [1, 2] did not connect to rank 0 in time" in str(results[0])


def test_the_limit_of_open_files_is_raised_when_streams_would_not_fit():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, before[1]))
        mesh._allow_files(700)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 700
        mesh._allow_files(1 << 40)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_ranks_are_gathered_by_what_memory_they_live_in():
    assert hosts.gathered([b"x", b"y", b"x", b"z"]) == [[0, 2], [1], [3]]


def test_costs_come_from_two_times():
    alpha, beta = hosts.costs_of(0.005, 0.105, 1_000_000)
    assert alpha == 0.005
    assert beta == pytest.approx(1e-7)
    assert min(hosts.costs_of(0.0, 0.0, 1)) > 0
