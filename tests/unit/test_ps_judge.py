"""One verdict over all servers: everybody gets the same whole, also after the judge changed, and nobody waits for the dead."""

from __future__ import annotations

import math
import threading

import pytest

from echelon.control.handshake import Identity
from echelon.errors import EchelonError, LinkLost, PeerLost
from echelon.ps.host import Host
from echelon.ps.judge import NAME, Judge, Reporter, Summary, Whole, whole
from echelon.ps.link import Link
from tests.unit.test_ps_session import RUN, TOKEN, soon


class Court:
    def __init__(self, shards: int) -> None:
        self.shards, self.host = shards, Host({NAME: Judge(shards)}, TOKEN, RUN)
        self.host.start()

    def judge(self) -> Link:
        if self.host is None:
            raise LinkLost("nobody judges")
        return Link.connect(self.host.address, TOKEN, Identity(RUN, "server", 0, 0), soon(1.0))

    def connect(self, rank: int) -> Link | None:
        return None

    def end(self) -> None:
        host, self.host = self.host, None
        host.close(soon())


@pytest.fixture
def court():
    made = Court(3)
    yield made
    if made.host is not None:
        made.end()


def ask(reporters, told, update=(-1, 1), lost=lambda: None):
    found = [None] * len(told)

    def one(shard):
        try:
            mine = told[shard] if isinstance(told[shard], Summary) else Summary(told[shard])
            found[shard] = reporters[shard].verdict(shard, 1, update, mine, lost)
        except EchelonError as error:
            found[shard] = error

    threads = [threading.Thread(target=one, args=(shard,)) for shard in range(len(told)) if told[shard]]
    for thread in threads:
        thread.start()
    return threads, found


def over(threads):
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.case("ps: NaN verdict and clip factor are global")
def test_every_server_gets_the_same_whole(court):
    reporters = [Reporter(court) for _ in range(3)]
    for number in range(1, 20):
        threads, found = ask(reporters, [[1.0], [2.5], [0.125, 0.125]], (-1, number))
        over(threads)
        assert found == [Whole(3.75)] * 3
    broken = Summary([math.nan], False, [(2, 7)])
    threads, found = ask(reporters, [[1.0], broken, [0.25]], (2, 1))
    over(threads)
    assert all(math.isnan(x.squares) for x in found)
    assert [(x.finite, x.whose) for x in found] == [(False, ((2, 7),))] * 3
    for reporter in reporters:
        reporter.close()


def test_a_judge_that_dies_has_a_successor_that_hears_everybody_again(court):
    reporters = [Reporter(court) for _ in range(3)]
    threads, found = ask(reporters, [[1.0], [2.0], None])
    court.end()
    late, rest = ask(reporters, [None, None, [4.0]])
    court.host = Host({NAME: Judge(3)}, TOKEN, RUN)
    court.host.start()
    over([*threads, *late])
    assert [*found[:2], rest[2]] == [Whole(7.0)] * 3
    for reporter in reporters:
        reporter.close()


def test_nobody_waits_for_the_part_of_a_worker_that_is_gone(court):
    reporters = [Reporter(court) for _ in range(3)]
    gone = []
    threads, found = ask(reporters, [[1.0], None, None], lost=lambda: PeerLost("worker 1") if gone else None)
    gone.append(True)
    over(threads)
    assert isinstance(found[0], PeerLost)
    for reporter in reporters:
        reporter.close()


def test_the_sum_does_not_depend_on_who_came_first():
    told = {2: Summary([1e-16, 3.0]), 0: Summary([1.0]), 1: Summary([1e-16])}
    assert whole(told) == whole(dict(sorted(told.items())))


class Bench(Court):
    """Three servers that can reach each other; the first judges, and then the second."""

    def __init__(self) -> None:
        self.leader = 0
        self.reporters = [Reporter(self, 3) for _ in range(3)]
        self.hosts = [Host({NAME: Judge(3, r.verdicts)}, TOKEN, RUN) for r in self.reporters]
        for host in self.hosts:
            host.start()

    def judge(self) -> Link:
        found = self.connect(self.leader)
        if found is None:
            raise LinkLost("nobody judges")
        return found

    def connect(self, rank: int) -> Link | None:
        host = self.hosts[rank]
        return (
            Link.connect(host.address, TOKEN, Identity(RUN, "server", 0, 0), soon(1.0))
            if host is not None
            else None
        )


def test_what_one_server_was_told_is_found_by_whoever_reports_to_the_next_judge():
    bench = Bench()
    threads, found = ask(bench.reporters, [[1.0], [2.0], [4.0]])
    over(threads)
    assert found == [Whole(7.0)] * 3
    bench.hosts[0].close(soon())  # the judge dies; shards 1 and 2 have made the update, and report no more
    bench.hosts[0], bench.leader = None, 1
    successor = Reporter(bench, 3)  # of shard 0, which has not
    bench.hosts[1].close(soon())
    bench.hosts[1] = Host({NAME: Judge(3, successor.verdicts)}, TOKEN, RUN)  # and was not told either
    bench.hosts[1].start()
    threads, found = ask([successor], [[1.0]])
    over(threads)
    assert found == [Whole(7.0)]
    for one in (successor, *bench.reporters):
        one.close()
    for host in filter(None, bench.hosts):
        host.close(soon())
