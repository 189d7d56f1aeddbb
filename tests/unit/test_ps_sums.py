"""How much of a bucket servers sum, in which messages, and how many of them are under way."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch

from echelon.clock import Deadline
from echelon.errors import LinkLost
from echelon.parallel.sums import cut, messages, servers_share
from echelon.ps.pending import Reply
from echelon.ps.window import Window


def hosts(num_workers, num_servers):
    return [f"w{i}" for i in range(num_workers)], [f"s{i}" for i in range(num_servers)]


@pytest.mark.parametrize("num_workers", [2, 3, 4, 8, 64])
def test_servers_take_a_little_less_than_their_links_could_carry(num_workers):
    for num_servers in (1, 2, num_workers):
        n, k = num_workers, num_servers
        exact = Fraction(2 * k * (n - 1), n * n + k * n - 2 * k)
        share = servers_share(*hosts(n, k))
        assert exact * 3 / 4 <= share <= exact
        least, carried = (Fraction(2 * (n - 1), n) * (1 - x) + x for x in (exact, share))
        assert carried <= least * Fraction(102, 100)


@pytest.mark.parametrize(
    ("workers", "servers"), [(["a", "b"], []), (["a", "b", "c"], ["a", "b"]), (["a", "a"], ["b"])]
)
def test_servers_without_a_link_of_their_own_or_without_anything_to_sum_take_nothing(workers, servers):
    assert servers_share(workers, servers) == 0


def test_a_piece_goes_in_messages_that_cover_it_once():
    pieces = cut(1_000_000, 4, Fraction(2, 3), 2)
    for begin, end in pieces:
        found = messages(begin, end, 4, 1 << 18)
        assert found[0][0] == begin
        assert found[-1][1] == end
        assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
        assert all(0 < b - a <= 1 << 16 for a, b in found)


class FakePending:
    def __init__(self):
        self.fns, self.error = [], None

    def then(self, fn):
        self.fns.append(fn)

    def wait(self, deadline):
        if self.error is not None:
            raise self.error
        return Reply({}, [])

    def finish(self, error=None):
        self.error = error
        for fn in self.fns:
            fn()


class FakeLink:
    server = "a server"

    def __init__(self):
        self.calls, self.lost = [], None

    def call(self, verb, head, piece, out):
        if self.lost is not None:
            raise self.lost
        self.calls.append((head["part"], FakePending()))
        return self.calls[-1][1]


def test_so_many_bytes_are_under_way_and_answers_let_the_next_go():
    links = [FakeLink(), FakeLink()]
    window = Window(links, num_bytes=4 * 400)
    batch = window.add(({"part": i}, torch.zeros(100)) for i in range(10))
    answered = []
    for sent in (4, 5, 6, 7, 8, 9, 10, 10, 10, 10):
        under_way = [one for link in links for one in link.calls if one not in answered]
        assert len(under_way) + len(answered) == sent
        answered.append(min(under_way, key=lambda one: one[0]))
        answered[-1][1].finish()
    assert [part for part, _ in answered] == list(range(10))
    assert batch.wait(Deadline.after(0)).tensors == []


def test_a_lost_connection_ends_the_wait_with_its_error():
    link = FakeLink()
    window = Window([link], num_bytes=1000)
    batch = window.add(({"part": i}, torch.zeros(100)) for i in range(4))
    link.lost = LinkLost("gone")
    for _, pending in list(link.calls):
        pending.finish(link.lost)
    with pytest.raises(LinkLost, match="gone"):
        batch.wait(Deadline.after(0))
