"""The Group over shared memory, its ranks played by threads of one process: who moves operations on, and in which order."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time

import pytest
import torch

from echelon import native
from echelon.clock import Deadline
from echelon.comm import handover
from echelon.comm.group import Lost, Met
from echelon.comm.over_native import NativeGroup

core = native.core()
pytestmark = pytest.mark.needs("core")
SOON_S = 30.0


@contextlib.contextmanager
def groups(size=2):
    chunk = handover.chunk_bytes(size)
    first = [os.memfd_create(f"shared-{i}") for i in range(size + 1)]
    core.format(first[0], size, chunk, handover.RING_BYTES, 1)
    for fd in first[1:]:
        core.reserve(fd, size, chunk, handover.RING_BYTES)
    each = [first] + [[os.dup(fd) for fd in first] for _ in range(size - 1)]
    made = [
        NativeGroup(core.ShmGroup(rank, fds[0], fds[1:], 1), rank, size, torch.device("cpu"))
        for rank, fds in enumerate(each)
    ]
    try:
        yield made
    finally:
        for group in made:
            group.close()


def at_once(*acts):
    """Runs them in a thread each; raises what any of them raised."""
    errors = []

    def guarded(act):
        try:
            act()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive(), "somebody waits for ever"
    if errors:
        raise errors[0]


def met(work):
    assert isinstance(work.wait(Deadline.after(SOON_S)), Met)


def test_an_urgent_operation_overtakes_one_that_a_peer_has_not_begun():
    with groups() as (a, b):
        large = [torch.ones(4 << 20), torch.ones(4 << 20)]
        first = a.all_reduce(large[0])
        small = [torch.ones(10), torch.ones(10)]
        at_once(*(lambda g=g, x=x: met(g.urgent().all_reduce(x)) for g, x in zip((a, b), small, strict=True)))
        assert [x[0].item() for x in small] == [2, 2]
        assert not first.work.done
        second = b.all_reduce(large[1])
        at_once(lambda: met(first), lambda: met(second))
        assert large[0][-1] == large[1][-1] == 2


def test_what_nobody_waits_for_goes_on_by_itself():
    with groups() as (a, b):
        xs = [torch.ones(1 << 20), torch.ones(1 << 20)]
        works = [a.all_reduce(xs[0]), b.all_reduce(xs[1])]
        until = time.monotonic() + SOON_S
        while not all(work.work.done for work in works) and time.monotonic() < until:
            threading.Event().wait(0.01)
        assert all(work.work.met for work in works)


@pytest.mark.parametrize("count", [1000, 100_000, 260_000])
def test_a_peer_that_waits_is_not_held_up_by_one_that_does_something_else(count):
    """Begun here, waited for there: whoever begun it may stand in anything, for as long as the other needs."""
    with groups() as (a, b):
        xs, over = [torch.ones(count), torch.ones(count)], threading.Event()
        for _ in range(3):
            mine = a.all_reduce(xs[0])

            def other(over=over):
                met(b.all_reduce(xs[1]))
                over.set()

            def elsewhere(over=over, mine=mine):
                assert over.wait(SOON_S), "the other side waits for ever"
                met(mine)

            at_once(other, elsewhere)
            over = threading.Event()


def test_several_threads_wait_for_several_operations_and_nobody_is_left():
    """Whoever waits drives; the others stand by and take over; the core's own thread leaves it to them."""
    draw = random.Random(7)
    with groups() as both:
        for _ in range(60):
            sizes = [draw.choice((10, 5000, 300_000)) for _ in range(4)]
            xs = [[torch.full((n,), float(group.rank + 1)) for n in sizes] for group in both]
            works = [[group.all_reduce(x) for x in mine] for group, mine in zip(both, xs, strict=True)]
            order = draw.sample(range(4), 4)
            at_once(*(lambda w=w: met(w) for i in order for w in (works[0][i], works[1][i])))
            assert all((x == 3).all() for mine in xs for x in mine)


def test_waiting_again_gives_the_same_outcome_and_a_lost_group_stays_lost():
    with groups() as (a, b):
        x = torch.ones(3)
        work = a.all_reduce(x)
        met(b.all_reduce(torch.ones(3)))
        met(work)
        met(work)
        a.abort("enough")
        lost = a.all_reduce(x).wait(Deadline.after(1))
        assert isinstance(lost, Lost)
        assert lost.reason == "enough"
        assert isinstance(b.all_reduce(x).wait(Deadline.after(SOON_S)), Lost)


def test_a_message_of_another_size_is_told_to_a_rank_that_has_long_been_waiting_for_it():
    """Who rests looks once more after it was woken: by then the message was found not to fit, and has no place to go."""
    with groups() as (a, b):
        waits = threading.Event()
        outcomes = []

        def waiter():
            work = b.recv(torch.zeros(5), 0, 3)
            waits.set()
            outcomes.append(work.wait(Deadline.after(SOON_S)))

        def sender():
            waits.wait(SOON_S)
            time.sleep(0.05)
            a.send(torch.zeros(9), 1, 3)

        at_once(waiter, sender)
        assert isinstance(outcomes[0], Lost)
        assert "rank 0 sent 36 bytes (tag 3) to a recv of 20 bytes" in outcomes[0].reason
