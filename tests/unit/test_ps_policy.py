"""How updates meet, as tables: events in, decisions out."""

from __future__ import annotations

import pytest

from echelon.errors import StrategyError
from echelon.ps.decisions import (
    Accept,
    AddDelta,
    Apply,
    Average,
    Delayed,
    Drop,
    Grant,
    Halt,
    Hold,
    Mean,
    Outer,
    Part,
    Rollback,
    Wait,
)
from echelon.ps.eager import Eager, lr_factor
from echelon.ps.ledger import Ledger
from echelon.ps.ordered import Ordered
from echelon.ps.policy import policy_of
from echelon.ps.quorum import Quorum
from echelon.ps.rounds import Rounds
from echelon.strategy import Strategy


def members(n: int) -> dict[int, int]:
    return dict.fromkeys(range(n), 0)


def kinds(decisions) -> list[str]:
    return [type(d).__name__ for d in decisions]


def only(decisions):
    (decision,) = decisions
    return decision


def take(policy, worker: int, step: int = 0) -> Part:
    """Asks, and gives the part that answers the grant."""
    grant = next(d for d in policy.asked(worker, step) if isinstance(d, Grant) and d.worker == worker)
    return part_of(grant)


def part_of(grant: Grant, incarnation: int = 0) -> Part:
    return Part(grant.worker, grant.step, grant.version, 4, incarnation, 0, grant.pieces)


# sync and bounded


@pytest.mark.case("ps: how updates meet")
def test_sync_applies_in_rank_order_whatever_the_order_of_arrival_with_true_counts():
    policy = Ordered(members(3))
    parts = {rank: Part(rank, 0, 0, count) for rank, count in ((0, 3), (1, 2), (2, 0))}
    assert kinds(policy.arrived(parts[2])) == ["Accept"]
    assert kinds(policy.arrived(parts[0])) == ["Accept"]
    accept, update = policy.arrived(parts[1])
    assert isinstance(accept, Accept)
    assert update == Apply(0, (parts[0], parts[1], parts[2]), 5, Mean(), update.reason)
    assert policy.version == 1


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        (Part(0, 5, 5, term=2), "term"),
        (Part(7, 5, 5, term=3), "stranger"),
        (Part(1, 5, 5, term=3), "incarnation"),
        (Part(0, 4, 4, term=3), "duplicate"),
        (Part(2, 5, 5, term=3), "duplicate"),
        (Part(0, 7, 4, term=3), "stale"),
        (Part(0, 7, 6, term=3), "ahead"),
        (Part(0, 5, 6, term=3), "ahead"),
        (Part(0, 8, 5, term=3), "stale"),
    ],
)
def test_what_a_bounded_server_does_not_take(part, kind):
    policy = Ordered({0: 0, 1: 1, 2: 0}, staleness=2, term=3, version=5)
    policy.arrived(Part(2, 5, 5, term=3))
    dropped = only(policy.arrived(part))
    assert isinstance(dropped, Drop)
    assert dropped.kind == kind
    assert dropped.reason


def test_a_worker_waits_for_the_version_that_the_bound_needs_and_is_told_whom_for():
    policy = Ordered(members(2), staleness=1)
    for step in (0, 1):
        assert only(policy.asked(0, step)) == Grant(0, step, 0, f"{step} behind, 1 allowed")
        policy.arrived(Part(0, step, 0))
    wait = only(policy.asked(0, 2))
    assert isinstance(wait, Wait)
    assert wait.missing == (1,)
    assert wait.reason == "step 2 needs version 1, here is 0, 1 behind is allowed"
    assert kinds(policy.arrived(Part(1, 0, 0))) == ["Accept", "Apply", "Grant"], (
        "applied first, then answered"
    )


def test_a_part_of_a_later_step_is_held_and_both_are_applied_once_the_first_is_complete():
    policy = Ordered(members(2), staleness=1, kept=2)
    assert isinstance(only(policy.arrived(Part(0, 1, 0))), Hold)
    assert isinstance(only(policy.arrived(Part(1, 1, 0))), Hold)
    policy.arrived(Part(1, 0, 0))
    decisions = policy.arrived(Part(0, 0, 0))
    assert [d.step for d in decisions if isinstance(d, Apply)] == [0, 1]
    assert decisions[2].staleness == (1, 1)


def test_an_update_waits_until_the_one_before_it_is_complete_everywhere():
    policy = Ordered(members(1))
    assert kinds(policy.arrived(Part(0, 0, 0))) == ["Accept", "Apply"]
    assert kinds(policy.arrived(Part(0, 1, 1))) == ["Accept"], "one earlier version is kept, not two"
    assert kinds(policy.committed(1)) == ["Apply"]


@pytest.mark.case("ps: a step is never torn")
def test_a_lost_member_halts_and_the_next_term_goes_back_to_what_all_servers_have():
    policy = Ordered(members(2))
    policy.arrived(Part(0, 0, 0))
    policy.arrived(Part(1, 0, 0))
    assert only(policy.lost(1, "was killed")) == Halt("worker 1 was killed")
    assert policy.lost(0) == [], "told once"
    assert only(policy.arrived(Part(0, 1, 1))).kind == "term"
    assert isinstance(only(policy.asked(0, 2)), Wait)
    rollback = only(policy.regroup(1, {0: 0, 1: 1}, 0))
    assert rollback == Rollback(0, "worker 1 was killed: term 1 goes on from version 0")
    assert policy.regroup(1, {0: 0}, 0) == [], "an old term changes nothing"
    assert only(policy.arrived(Part(0, 0, 0))).kind == "term"
    assert only(policy.arrived(Part(1, 0, 0, term=1))).kind == "incarnation"
    policy.arrived(Part(1, 0, 0, incarnation=1, term=1))
    assert kinds(policy.arrived(Part(0, 0, 0, term=1))) == ["Accept", "Apply"]


def test_nothing_is_applied_while_halted_even_if_all_parts_are_here():
    policy = Ordered(members(1))
    policy.arrived(Part(0, 0, 0))
    policy.arrived(Part(0, 1, 1))
    policy.joined(1, 0)
    assert policy.committed(1) == []
    assert kinds(policy.regroup(1, members(2), 1)) == ["Rollback"], "the part that was held is computed again"


def test_a_term_cannot_undo_what_every_server_has_nor_do_what_this_one_has_not():
    policy = Ordered(members(1), version=4)
    for version in (3, 5):
        with pytest.raises(ValueError, match=f"agrees on version {version}"):
            policy.regroup(1, members(1), version)


def test_a_worker_that_does_not_know_how_far_the_others_are_is_told_the_next_step():
    assert only(Ordered(members(1), version=4).asked(0, 0)).step == 4


# backup


def test_backup_takes_the_first_parts_and_returns_the_late_one_to_be_dealt_first():
    policy = Quorum(members(3), Ledger(range(10)), backup=1)
    parts = [take(policy, rank) for rank in range(3)]
    assert [p.pieces for p in parts] == [(0,), (1,), (2,)]
    assert kinds(policy.arrived(parts[2])) == ["Accept"]
    assert isinstance(only(policy.asked(2, 1)), Wait), "one part a worker and step"
    decisions = policy.arrived(parts[0])
    assert kinds(decisions) == ["Accept", "Apply", "Grant"]
    assert decisions[1].parts == (parts[0], parts[2])
    assert decisions[1].divisor == 8
    dropped = policy.arrived(parts[1])[0]
    assert isinstance(dropped, Drop)
    assert (dropped.kind, dropped.returns) == ("stale", (1,))
    assert take(policy, 1).pieces == (1,)
    assert only(policy.arrived(parts[0])).kind == "duplicate"
    assert only(policy.arrived(parts[1])).kind == "foreign"


def test_aggregating_more_than_there_are_workers_lets_fast_ones_compute_several_parts_of_a_step():
    policy = Quorum(members(2), Ledger(range(10)), aggregate=3)
    slow = take(policy, 1)
    for _ in range(2):
        policy.arrived(take(policy, 0))
    wait = only(policy.asked(0, 2))
    assert wait.reason == "all 3 parts of step 0 are dealt"
    decisions = policy.arrived(slow)
    assert [p.worker for p in decisions[1].parts] == [0, 0, 1]
    assert isinstance(decisions[2], Grant)


def test_a_lost_worker_is_not_waited_for_and_what_it_delivered_stays():
    policy = Quorum(members(3), Ledger(range(10)))
    parts = [take(policy, rank) for rank in range(3)]
    policy.arrived(parts[0])
    policy.arrived(parts[1])
    assert kinds(policy.lost(2)) == ["Apply"]
    assert only(policy.arrived(parts[2])).kind == "stranger"
    policy.joined(2, 1)
    assert only(policy.arrived(parts[2])).kind == "incarnation"
    assert take(policy, 2).pieces == (2,)


def test_the_old_process_cannot_answer_for_the_new_one():
    policy = Quorum(members(2), Ledger(range(4)))
    old = take(policy, 1)
    policy.joined(1, 1)
    again = take(policy, 1)
    assert again.pieces == old.pieces
    assert again.version == old.version
    assert only(policy.arrived(old)).kind == "incarnation"


def test_a_worker_that_comes_again_is_waited_for():
    policy = Quorum(members(2), Ledger(range(9)))
    policy.arrived(take(policy, 0))
    take(policy, 1)
    assert policy.joined(1, 1) == [], "no update of one part in between"
    grant = only(policy.asked(1, 0))
    assert kinds(policy.arrived(part_of(grant, incarnation=1))) == ["Accept", "Apply"]


def test_a_question_may_overtake_the_part_before_it():
    policy = Eager(members(1), Ledger(range(9)))
    part = take(policy, 0, step=0)
    assert only(policy.asked(0, 1)).reason == "its part of step 0 is not here yet"
    assert kinds(policy.arrived(part)) == ["Accept", "Apply", "Grant"]


def test_the_last_parts_of_an_epoch_make_an_update_of_their_own_and_the_next_epoch_is_dealt_to_who_waits():
    policy = Quorum(members(3), Ledger(range(2)))
    first, second = take(policy, 0), take(policy, 1)
    assert policy.asked(2, 0)[0].reason.startswith("every piece of the epoch is dealt")
    policy.arrived(first)
    decisions = policy.arrived(second)
    assert kinds(decisions) == ["Accept", "Apply"]
    assert "no other is left in the epoch" in decisions[1].reason
    assert policy.ledger.complete
    assert only(policy.open([2, 3])).pieces == (2,)
    with pytest.raises(ValueError, match="2 pieces of the epoch are not counted"):
        policy.open([9])


def test_who_asks_again_gets_the_same_pieces_on_the_newest_version():
    policy = Quorum(members(2), Ledger(range(9)), backup=1)
    late = take(policy, 1)
    policy.arrived(take(policy, 0))
    again = take(policy, 1)
    assert (again.pieces, again.version) == (late.pieces, 1)
    assert only(policy.arrived(late)).kind == "foreign"
    assert policy.arrived(again)[0].part == again


def test_updates_that_some_server_lost_go_back_with_their_pieces():
    policy = Eager(members(2), Ledger(range(6)))
    for rank in (0, 1, 0):
        policy.arrived(take(policy, rank))
    policy.committed(1)
    held = take(policy, 1)
    rollback = policy.regroup(1, members(2), 1)[0]
    assert isinstance(rollback, Rollback)
    assert policy.version == 1
    assert only(policy.arrived(held)).kind == "foreign"
    assert [take(policy, rank).pieces for rank in (0, 1)] == [(1,), (2,)]
    with pytest.raises(ValueError, match="agrees on version 0"):
        policy.regroup(2, members(2), 0)


# async and local


def test_async_makes_every_push_an_update_and_says_how_late_it_was():
    policy = Eager(members(2), Ledger(range(9)), compensation=0.04, scale_lr=True)
    slow = take(policy, 1)
    for step in range(3):
        update = policy.arrived(take(policy, 0))[1]
        assert update.rule == Delayed(0, 1.0, 0.04)
        assert update.step == step
    assert policy.arrived(slow)[1].rule == Delayed(3, 1 / 3, 0.04)
    assert [lr_factor(s) for s in (0, 1, 4)] == [1.0, 1.0, 0.25]


def test_geo_adds_each_workers_share_of_what_it_moved():
    policy = Eager(members(4), Ledger(range(9)), local_steps=2, geo=AddDelta)
    part = take(policy, 2)
    assert part.pieces == (0, 1)
    assert policy.arrived(part)[1].rule == AddDelta(0.25)


def test_a_round_waits_for_every_member_while_there_is_work_for_it():
    policy = Rounds(members(3), Ledger(range(7)), 2, Outer())
    policy.arrived(take(policy, 0))
    policy.arrived(take(policy, 1))
    wait = only(policy.asked(0, 1))
    assert wait.reason == "round 0 waits for [2]"
    decisions = policy.arrived(take(policy, 2))
    assert kinds(decisions) == ["Accept", "Apply", "Grant"]
    assert decisions[1].rule == Outer(lr=0.7, momentum=0.9, nesterov=True)
    assert decisions[2].pieces == (6,)
    policy.committed(1)
    assert kinds(policy.arrived(part_of(decisions[2]))) == ["Accept", "Apply"], "the others have nothing left"


def test_a_round_goes_on_without_a_member_that_is_lost():
    policy = Rounds(members(2), Ledger(range(4)), 2, Average())
    policy.arrived(take(policy, 0))
    take(policy, 1)
    assert kinds(policy.lost(1)) == ["Apply"]
    assert policy.ledger.waiting == 2


# which policy a strategy means


@pytest.mark.parametrize(
    ("strategy", "extra", "kind"),
    [
        (Strategy(form="ps"), {}, Ordered),
        (Strategy(form="ps", update="bounded", staleness=4), {}, Ordered),
        (Strategy(form="ps", backup=1), {}, Quorum),
        (Strategy(form="ps"), {"aggregate": 6}, Quorum),
        (Strategy(form="ps", update="async"), {}, Eager),
        (Strategy(form="ps", update="local", local_steps=5), {}, Rounds),
        (Strategy(form="ps", update="local"), {"local": "geo"}, Eager),
    ],
)
def test_the_policy_of_a_strategy(strategy, extra, kind):
    policy = policy_of(strategy, members(4), **extra)
    assert type(policy) is kind
    assert policy.alone == (kind is Ordered)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Strategy(form="ps", update="async", backup=1), "backup=1 does not go with update=async"),
        (Strategy(form="ps", staleness=2), "staleness=2 does not go with update=sync"),
        (Strategy(form="ps", backup=4), "backup=4 of 4 workers"),
    ],
)
def test_what_contradicts_itself_is_refused(strategy, message):
    with pytest.raises(StrategyError, match=message):
        policy_of(strategy, members(4))


def test_bounded_by_zero_decides_as_sync_does():
    sync = policy_of(Strategy(form="ps"), members(2))
    bounded = policy_of(Strategy(form="ps", update="bounded"), members(2))
    for event in (
        lambda p: p.asked(0, 0),
        lambda p: p.arrived(Part(0, 0, 0)),
        lambda p: p.asked(0, 1),
        lambda p: p.arrived(Part(1, 0, 0)),
        lambda p: p.arrived(Part(0, 1, 1)),
        lambda p: p.lost(1),
        lambda p: p.regroup(1, {0: 0}, 0),
    ):
        assert event(sync) == event(bounded)


# the ledger


def test_pieces_that_come_back_are_dealt_before_new_ones_in_their_order():
    ledger = Ledger(range(6))
    ledger.deal(0, 3)
    ledger.give_back([2])
    ledger.give_back([0])
    assert ledger.deal(1, 3) == (0, 2, 3)
    assert ledger.returned == 2
    assert ledger.holders() == (0, 1)


def test_a_piece_cannot_be_counted_twice_or_without_being_here():
    ledger = Ledger(range(2))
    ledger.deal(0)
    with pytest.raises(KeyError):
        ledger.count([0], 0)
    ledger.hold([0])
    ledger.count([0], 0)
    with pytest.raises(KeyError):
        ledger.count([0], 1)
    with pytest.raises(KeyError):
        ledger.give_back([0])
