"""The core's TCP group in one process: ranks are threads, connections are pairs of sockets that the test can touch."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

import numpy as np
import pytest

from echelon import native

core = native.core()
pytestmark = pytest.mark.needs("core")

SOON_S = 30.0
BARRIER, ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, GATHER, SCATTER = range(8)
F32, F64, U8 = 0, 1, 5
SUM = 0
STREAMS = 6


class Mesh:
    """`size` groups over pairs of sockets; `wires[a][b][i]` is a's end of its stream i to b."""

    def __init__(self, size: int, term: int = 1, streams: int = STREAMS) -> None:
        self.size = size
        self.wires = [[[-1] * streams if a != b else [] for b in range(size)] for a in range(size)]
        for a in range(size):
            for b in range(a):
                for i in range(streams):
                    left, right = socket.socketpair()
                    self.wires[a][b][i], self.wires[b][a][i] = left.detach(), right.detach()
        self.groups = [core.TcpGroup(a, self.wires[a], term, 10.0, "") for a in range(size)]

    def close(self) -> None:
        for group in self.groups:
            group.close()


@contextlib.contextmanager
def mesh(size, **options):
    made = Mesh(size, **options)
    try:
        yield made
    finally:
        made.close()


def at(x):
    return x.ctypes.data


def collective(group, kind, x, out=None, root=0, op=SUM, count=None, lane=0):
    dtype = {np.dtype("f4"): F32, np.dtype("f8"): F64, np.dtype("u1"): U8}[x.dtype]
    return group.collective(
        kind, dtype, op, root, x.size if count is None else count, at(x), 0 if out is None else at(out), lane
    )


def together(mesh, act):
    """Runs act(rank, group) on every rank; raises what any of them raised."""
    errors = []

    def body(rank):
        try:
            act(rank, mesh.groups[rank])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SOON_S)
    if errors:
        raise errors[0]


def folded(parts):
    total = parts[0].copy()
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.case("TCP: sums in rank order, whatever the way")
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(
    "costs",
    [(1e-9, 1e-6, 0.0), (1.0, 1e-12, 0.0), (1e-9, 1e-12, 1.0)],
    ids=["slices", "flat", "doubling"],
)
def test_the_bits_do_not_depend_on_the_way(size, costs):
    rng = np.random.default_rng(size)
    sizes = [0, 1, 5, 1000, 70_001, 600_000]
    data = [[rng.standard_normal(n).astype("f4") for n in sizes] for _ in range(size)]

    def act(rank, group):
        group.set_costs(*costs)
        for i, n in enumerate(sizes):
            x = data[rank][i].copy()
            assert collective(group, ALL_REDUCE, x).wait(SOON_S)
            want = folded([data[r][i] for r in range(size)])
            assert np.array_equal(x.view("u4"), want.view("u4")), n
            for root in range(size):
                y = data[rank][i].copy()
                assert collective(group, REDUCE, y, root=root).wait(SOON_S)
                assert np.array_equal(y, want if rank == root else data[rank][i])
                z = data[rank][i].copy()
                assert collective(group, BROADCAST, z, root=root).wait(SOON_S)
                assert np.array_equal(z, data[root][i])

    with mesh(size) as made:
        together(made, act)


def test_the_way_is_chosen_by_cost():
    slow_link = (50e-6, 1e-8, 8e-6)
    assert core.way(ALL_REDUCE, 8, 4, *slow_link) == "flat"
    assert core.way(ALL_REDUCE, 8, 64, *slow_link) == "bruck"
    assert core.way(ALL_REDUCE, 25 << 20, 4, *slow_link) == "slices"
    assert core.way(ALL_REDUCE, 25 << 20, 2, *slow_link) == "slices", "memory is bounded"
    assert core.way(BROADCAST, 64, 16, *slow_link) == "flat"
    assert core.way(BROADCAST, 25 << 20, 4, *slow_link) == "slices"
    assert core.way(BARRIER, 0, 100, *slow_link) == "bruck"


@pytest.mark.case("TCP: mismatched calls name both sides")
def test_different_operations_name_both_sides():
    reasons = {}

    def act(rank, group):
        x = np.ones(3 + rank, "f4")
        work = collective(group, ALL_REDUCE if rank == 0 else BROADCAST, x)
        assert not work.wait(SOON_S)
        reasons[rank] = group.failure()[1]

    with mesh(2) as made:
        together(made, act)
    for reason in reasons.values():
        assert "rank 0 all_reduce (sum) of 3 float32" in reason
        assert "rank 1 broadcast with root 0 of 4 float32" in reason


def test_one_rank_is_an_operation_ahead():
    with mesh(2) as made:
        a, b = made.groups
        x = np.ones(4, "f4")
        assert collective(a, BROADCAST, x).wait(SOON_S)  # the root needs nobody
        late = collective(a, ALL_GATHER, x, np.zeros(8, "f4"))
        y = np.zeros(4, "f4")
        assert not collective(b, ALL_GATHER, y, np.zeros(8, "f4")).wait(SOON_S)
        assert not late.wait(SOON_S)
        assert "broadcast" in b.failure()[1]
        assert "all_gather" in b.failure()[1]


def test_a_frame_of_an_older_term_is_refused():
    with mesh(2, term=7) as made:
        head = bytearray(64)
        struct.pack_into("<IBBHQQ", head, 0, 0x65636831, 1, 0, 0, 6, 0)
        with socket.socket(fileno=made.wires[1][0][2]) as wire:
            wire.sendall(head)
            wire.detach()
        assert not collective(made.groups[0], ALL_REDUCE, np.ones(2, "f4")).wait(SOON_S)
        assert "sent a frame of term 6; this is term 7" in made.groups[0].failure()[1]


def test_garbage_ends_the_group_and_names_the_sender():
    with mesh(3) as made:
        with socket.socket(fileno=made.wires[1][0][2]) as wire:
            wire.sendall(b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n" * 3)
            wire.detach()
        assert not collective(made.groups[0], ALL_REDUCE, np.ones(2, "f4")).wait(SOON_S)
        peers, reason, _ = made.groups[0].failure()
        assert peers == [1]
        assert "not a frame" in reason
        assert not collective(made.groups[2], ALL_REDUCE, np.ones(2, "f4")).wait(SOON_S)
        assert made.groups[2].failure()[0] == [1], "the cause, not who told"


def test_a_late_rank_is_named_at_the_deadline():
    with mesh(3) as made:
        works = [collective(group, ALL_REDUCE, np.ones(5, "f4")) for group in made.groups[:2]]
        assert not works[0].wait(0.3)
        peers, reason, cause = made.groups[0].failure()
        assert (peers, cause) == ([2], "late")
        assert "waiting for rank 2" in reason
        assert not works[1].wait(SOON_S)
        assert made.groups[1].failure()[0] == [2]


def test_abort_from_another_thread_ends_a_wait_everywhere():
    with mesh(2) as made:
        threading.Timer(0.2, made.groups[0].abort, args=([], "enough")).start()
        began = time.monotonic()
        works = [collective(made.groups[0], BARRIER, np.zeros(0, "u1"))]
        assert not works[0].wait(SOON_S)
        assert not collective(made.groups[1], BARRIER, np.zeros(0, "u1")).wait(SOON_S)
        assert time.monotonic() - began < 10
        assert "enough" in made.groups[0].failure()[1]
        assert "enough" in made.groups[1].failure()[1]


def test_who_left_is_named_and_what_it_sent_before_still_arrives():
    with mesh(2) as made:
        a, b = made.groups
        x = np.arange(50_000, dtype="f4")
        assert collective(a, BROADCAST, x).wait(SOON_S)
        a.close()
        y = np.zeros(50_000, "f4")
        assert collective(b, BROADCAST, y).wait(SOON_S)
        assert np.array_equal(x, y)
        assert not collective(b, ALL_REDUCE, y).wait(SOON_S)
        peers, reason, cause = b.failure()
        assert (peers, cause) == ([0], "left")
        assert "rank 0 has left" in reason


@pytest.mark.case("TCP: bounded memory, tags in any order")
def test_messages_in_any_order_and_none_holds_up_another():
    """Far more is sent than a receiver keeps aside; it asks in the reverse order, while a collective goes on."""
    num, n = 24, 1 << 20

    def act(rank, group):
        if rank == 0:
            data = [np.full(n, i, "u1") for i in range(num)]
            works = [group.message(True, at(x), n, 1, i) for i, x in enumerate(data)]
        else:
            data = [np.zeros(n, "u1") for _ in range(num)]
            works = []
        x = np.ones(1000, "f4")
        assert collective(group, ALL_REDUCE, x).wait(SOON_S)
        assert x[0] == 2
        for i in reversed(range(num)):
            if rank == 1:
                work = group.message(False, at(data[i]), n, 0 if i % 2 else -1, i)
                assert work.wait(SOON_S), group.failure()
                assert work.peer == 0
                assert (data[i] == i).all()
        assert all(work.wait(SOON_S) for work in works)

    with mesh(2) as made:
        together(made, act)


def test_an_urgent_lane_is_not_held_up_by_one_that_a_peer_has_not_begun():
    with mesh(2) as made:
        a, b = made.groups
        big = [np.ones(4 << 20, "f4") for _ in range(2)]
        first = collective(a, ALL_REDUCE, big[0])

        def urgent(rank, group):
            x = np.ones(10, "f4")
            assert collective(group, ALL_REDUCE, x, lane=1).wait(SOON_S)
            assert x[0] == 2

        together(made, urgent)
        assert not first.done
        second = collective(b, ALL_REDUCE, big[1])
        assert second.wait(SOON_S)
        assert first.wait(SOON_S)
        assert big[0][-1] == big[1][-1] == 2
