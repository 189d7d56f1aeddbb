"""Who has reported what, and what follows from it; how stale parts were."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.ps.decisions import Part
from echelon.ps.pace import Pace
from echelon.ps.staleness import EXACT, Staleness
from echelon.ps.versions import Arrivals, Completion, Kept, agreed


def test_a_part_is_whole_once_when_the_last_server_has_it():
    arrivals = Arrivals([0, 1])
    part = Part(0, 3, 3)
    assert not arrivals.report(0, part)
    assert not arrivals.report(0, part)
    assert arrivals.report(1, part)
    with pytest.raises(ValueError, match="server 2"):
        arrivals.report(2, part)


def test_half_a_part_of_a_dead_process_is_forgotten():
    arrivals = Arrivals([0, 1])
    old, new = Part(0, 3, 3, incarnation=0), Part(0, 3, 3, incarnation=1)
    arrivals.report(0, old)
    arrivals.report(0, new)
    assert arrivals.forget(0, before=1) == [old]
    assert not arrivals.report(1, old)
    assert arrivals.report(1, new)


def test_an_update_is_complete_when_every_server_applied_it():
    completion = Completion([0, 1, 2])
    assert [completion.report(s, 1) for s in (0, 2, 2, 1)] == [0, 0, 0, 1]
    completion.report(1, 2)
    assert completion.behind() == (0, 2)


def test_a_report_from_before_a_rollback_does_not_complete_anything():
    completion = Completion([0, 1])
    completion.report(0, 1, term=0)
    completion.rollback(0, term=1)
    completion.report(0, 1, term=1)
    assert completion.report(1, 1, term=0) == 0
    assert completion.report(1, 1, term=1) == 1


def test_what_every_server_applied_is_complete_even_if_nobody_heard_of_it():
    assert agreed({0: 5, 1: 5}) == 5
    assert agreed({0: 5, 1: 4, 2: 5}) == 4


@pytest.mark.case("ps: a step is never torn")
def test_a_server_keeps_the_version_before_until_the_new_one_is_complete():
    kept = Kept(3)
    kept.apply(3)
    assert kept.versions == (3, 4)
    assert kept.rollback(3) == (4,)
    kept.apply(3)
    assert kept.commit(4) == (3,)
    assert kept.commit(4) == ()
    assert kept.versions == (4,)


def test_an_update_is_not_applied_twice_nor_left_out_and_what_is_freed_is_gone():
    kept = Kept(3)
    for step in (2, 4):
        with pytest.raises(ValueError, match="lost or counted twice"):
            kept.apply(step)
    with pytest.raises(ValueError, match="here is 3"):
        kept.commit(4)
    with pytest.raises(ValueError, match="not kept"):
        kept.rollback(2)


@given(st.lists(st.sampled_from(["apply", "commit", "rollback"]), max_size=60), st.integers(1, 3))
def test_there_is_always_a_version_to_go_back_to_and_never_more_than_asked_for(moves, most):
    kept, complete = Kept(), 0
    for move in moves:
        if move == "apply" and kept.newest - complete < most:
            kept.apply(kept.newest)
        elif move == "commit":
            complete = min(complete + 1, kept.newest)
            kept.commit(complete)
        elif move == "rollback":
            kept.rollback(complete)
        assert kept.versions == tuple(range(complete, kept.newest + 1))
        assert len(kept.versions) <= most + 1


# staleness


@pytest.mark.case("ps: staleness statistics")
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=200), st.sampled_from([50.0, 99.0, 100.0]))
def test_percentiles_are_exact_for_small_values_and_never_too_low_for_large_ones(values, percent):
    stats = Staleness()
    for value in values:
        stats.add(value)
    exact = sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
    found = stats.percentile(percent)
    assert found == exact if exact < EXACT else exact <= found <= min(2 * exact, max(values))
    assert stats.max == max(values)
    assert sum(stats.histogram().values()) == stats.total == len(values)


def test_memory_stays_bounded_and_servers_add_up():
    one, other = Staleness(), Staleness()
    for value in range(100_000):
        (one if value % 2 else other).add(value)
    assert len(one.histogram()) < 100
    one.merge(other.histogram(), other.max)
    assert (one.total, one.max) == (100_000, 99_999)
    assert one.percentile(100) == 99_999
    assert (Staleness().p50, Staleness().p99, Staleness().max) == (0, 0, 0)


def test_nobody_computes_on_the_future():
    with pytest.raises(ValueError, match="future"):
        Staleness().add(-1)


@pytest.mark.case("ps: staleness statistics")
@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=200))
def test_classes_are_few_and_hold_every_part_once(values):
    stats = Staleness()
    for value in values:
        stats.add(value)
    found = {int(low): count for low, count in stats.classes().items()}
    assert len(found) <= 19
    for low, count in found.items():
        top = max(0, 2 * low - 1) if low != 1 else 1
        assert count == sum(low <= value <= top for value in values)
    assert sum(found.values()) == len(values)


@pytest.mark.parametrize(
    ("looks", "busy_s"),
    [
        ([], 0.0),
        ([(1.0, 0), (2.0, 0)], 0.0),
        ([(1.0, 0), (2.0, 5), (3.0, 5)], 1.0),
        ([(1.0, 0), (2.0, 5), (3.0, 5), (4.0, 6), (9.0, 6)], 3.0),
        ([(4.0, 3)], 0.0),
        ([(4.0, 3), (6.0, 4)], 2.0),
    ],
)
def test_rates_are_taken_from_before_the_first_work_to_after_the_last(looks, busy_s):
    pace = Pace()
    for now, count in looks:
        pace.look(now, count)
    assert pace.busy_s == busy_s
