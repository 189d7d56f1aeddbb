"""The lists of every schedule: whole, in order, without deadlock, within their memory, and with the bubble that was promised."""

from __future__ import annotations

import itertools

import pytest

from echelon.parallel.pipeline import replicas
from echelon.parallel.pipeline.bubble import Times, alive, held, predicted, simulate
from echelon.parallel.pipeline.contract import Action
from echelon.parallel.pipeline.schedule import needs, num_stages, owners, plain

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")
TABLE = [
    (schedule, places, micros, chunks)
    for schedule, places, micros, chunks in itertools.product(SCHEDULES, range(1, 7), range(1, 14), (1, 2, 3))
    if chunks == 1 or schedule == "interleaved"
]
UNEVEN = [(3, 1), (1, 2), (2, 1), (2, 2), (2, 1, 2), (1, 3, 1), (4, 1, 3)]


def times(schedule):
    """A backward costs two forwards, whether or not its halves are apart."""
    return Times(1, 1, 1) if schedule == "zero-bubble" else Times(1, 2)


def whole(orders, stages, micros, apart):
    kinds = ("forward", "backward", "weights") if apart else ("forward", "backward")
    every = {Action(k, s, m) for k in kinds for s in range(stages) for m in range(micros)}
    done = [a for order in orders for a in order]
    return len(done) == len(every) and set(done) == every


@pytest.mark.case("pipeline: schedules are whole and cannot deadlock")
def test_every_action_comes_once_on_the_worker_of_its_stage_and_after_what_it_needs():
    for schedule, places, micros, chunks in TABLE:
        orders = plain(schedule, places, micros, chunks)
        stages = num_stages(schedule, places, chunks)
        assert len(orders) == places
        assert whole(orders, stages, micros, schedule == "zero-bubble"), (schedule, places, micros, chunks)
        for w, order in enumerate(orders):
            at = {a: i for i, a in enumerate(order)}
            assert all(a.stage % places == w for a in order)
            assert all(at[n] < at[a] for a in order for n in needs(a, stages) if n in at)


@pytest.mark.case("pipeline: schedules are whole and cannot deadlock")
def test_no_schedule_deadlocks_with_receives_that_block():
    for case in TABLE:
        assert simulate(plain(*case), Times(1, 2, 1, transfer=0.3)).waits == {}, case


def test_micro_batches_of_a_stage_come_in_order_in_every_direction():
    for case in TABLE:
        for order in plain(*case):
            for kind, stage in {(a.kind, a.stage) for a in order}:
                micros = [a.micro for a in order if (a.kind, a.stage) == (kind, stage)]
                assert micros == sorted(micros), case


def test_the_lists_are_written_down_for_small_cases():
    text = lambda order: " ".join(f"{a.kind[0].upper()}{a.micro}" for a in order)  # noqa: E731
    assert [text(o) for o in plain("1f1b", 2, 3)] == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert [text(o) for o in plain("gpipe", 2, 2)] == ["F0 F1 B0 B1"] * 2
    assert [text(o) for o in plain("1f1b", 1, 2)] == ["F0 B0 F1 B1"]
    assert [text(o) for o in plain("zero-bubble", 2, 3)] == [
        "F0 F1 B0 W0 F2 B1 W1 B2 W2",
        "F0 B0 F1 B1 W0 F2 B2 W1 W2",
    ]


def test_a_worker_holds_the_micro_batches_that_are_alive_and_the_backward_of_one():
    for places, micros in ((2, 4), (4, 8)):
        for schedule in ("1f1b", "gpipe"):
            for order in plain(schedule, places, micros):
                assert held(order, lambda stage, micro: (100, 130, 0)) == alive(order) * 100 + 30
                assert held(order, lambda stage, micro: (100, 100, 0)) == alive(order) * 100


def test_what_is_put_off_is_held_until_its_weights_have_their_gradients():
    forward, backward, weights = (Action(kind, 0, 0) for kind in ("forward", "backward", "weights"))
    again = [Action(kind, 0, 1) for kind in ("forward", "backward", "weights")]
    sizes = lambda stage, micro: (100, 130, 60)  # noqa: E731
    assert held((forward, backward, weights, *again), sizes) == 130
    assert held((forward, backward, *again, weights), sizes) == 60 + 130
    assert held((), sizes) == 0


def test_1f1b_and_zero_bubble_keep_few_micro_batches_alive():
    for places, micros in itertools.product(range(1, 7), range(1, 14)):
        for stage, order in enumerate(plain("1f1b", places, micros)):
            assert alive(order) == min(places - stage, micros)
        for order in plain("zero-bubble", places, micros):
            assert alive(order) <= min(places, micros)
        for order in plain("gpipe", places, micros):
            assert alive(order) == micros


@pytest.mark.case("pipeline: the bubble, predicted")
def test_the_bubble_of_gpipe_is_the_one_of_the_formula_and_the_others_are_below_it():
    for places, micros in itertools.product(range(1, 7), range(1, 14)):
        bubble = {s: simulate(plain(s, places, micros, 2), times(s)).bubble for s in SCHEDULES}
        assert bubble["gpipe"] == pytest.approx(predicted(places, micros))
        assert bubble["1f1b"] == pytest.approx(bubble["gpipe"])
        if places > 1:
            assert bubble["zero-bubble"] < bubble["gpipe"]
            assert bubble["interleaved"] < bubble["gpipe"] or micros == 1
        if micros >= places:
            assert bubble["zero-bubble"] == pytest.approx((places - 1) / (3 * micros + places - 1))
            assert bubble["interleaved"] == pytest.approx((places - 1) / (2 * micros + places - 1))


def test_lists_that_stand_still_are_told_with_what_each_worker_waits_for():
    f, b = (lambda s, m: Action("forward", s, m)), (lambda s, m: Action("backward", s, m))
    orders = ((f(0, 0), b(0, 0), f(0, 1), b(0, 1)), (f(1, 0), f(1, 1), b(1, 0), b(1, 1)))
    assert simulate(orders).waits == {0: b(0, 0), 1: f(1, 1)}


def test_a_transfer_makes_the_way_longer_and_a_worker_alone_has_none():
    assert simulate(plain("gpipe", 2, 1), Times(1, 2, 0, transfer=0.5)).makespan == 7
    assert simulate(plain("gpipe", 1, 3), Times(1, 2, 0, transfer=0.5)).makespan == 9


@pytest.mark.case("pipeline: micro-batches dealt to unequal workers")
def test_shares_follow_speeds_and_nobody_is_given_what_holds_up_the_others():
    assert replicas.shared(12, [1, 1, 1]) == (4, 4, 4)
    assert replicas.shared(5, [1, 1, 1]) == (2, 2, 1)
    assert replicas.shared(8, [3, 1]) == (6, 2)
    assert replicas.shared(2, [3, 1]) == (2, 0)
    assert replicas.shared(4, [9, 1, 1]) == (4, 0, 0)
    assert replicas.shared(1, [1, 1]) == (1, 0)
    assert replicas.shared(7, [2.5]) == (7,)


def test_micro_batches_are_numbered_as_they_will_be_over_or_begun():
    assert replicas.dealt((6, 2), (1, 3)) == [(0, 1, 2, 4, 5, 6), (3, 7)]
    assert replicas.dealt((6, 2), (1, 3), into=True) == [(0, 2, 3, 4, 6, 7), (1, 5)]
    assert replicas.dealt((2, 2, 1), (1, 1, 1)) == [(0, 3), (1, 4), (2,)]


@pytest.mark.case("pipeline: micro-batches dealt to unequal workers")
def test_shares_change_when_that_pays_and_not_for_noise():
    assert replicas.redealt((4, 4), (1.0, 1.05)) == (4, 4)
    assert replicas.redealt((4, 4), (1.0, 3.0)) == (6, 2)
    assert replicas.redealt((6, 2), (1.0, 3.0)) == (6, 2)
    shares, changes = (4, 4, 4), 0
    for step in range(100):  # within 8 % of each other, in turn
        new = replicas.redealt(shares, [1 + 0.08 * ((step + r) % 3 == 0) for r in range(3)])
        changes, shares = changes + (new != shares), new
    assert changes == 0


@pytest.mark.case("pipeline: micro-batches dealt to unequal workers")
def test_unequal_pipelines_are_whole_and_cannot_deadlock_whatever_the_speeds():
    skewed = [[1.0, 30.0, 7.0, 0.3], [2.0, 1.0, 1.0, 1.0]]
    for schedule, widths, micros in itertools.product(("1f1b", "gpipe", "zero-bubble"), UNEVEN, range(1, 14)):
        for pace in (None, *([row[:w] for w in widths] for row in skewed)):
            orders = replicas.orders(schedule, widths, micros, seconds=pace)
            case = (schedule, widths, micros, pace)
            assert len(orders) == sum(widths), case
            assert whole(orders, len(widths), micros, schedule == "zero-bubble"), case
            assert simulate(orders, Times(1, 2, 1, transfer=0.3)).waits == {}, case
            stage_of = [s for s, width in enumerate(widths) for _ in range(width)]
            assert all(stage_of[w] == stage for (stage, _), w in owners(orders).items()), case


def test_one_worker_a_stage_is_the_plain_schedule():
    for schedule, places, micros, chunks in TABLE:
        assert replicas.orders(schedule, (1,) * places, micros, chunks) == plain(
            schedule, places, micros, chunks
        )


@pytest.mark.case("pipeline: micro-batches dealt to unequal workers")
def test_three_workers_for_the_slow_stage_are_nearly_three_times_as_fast_as_one():
    def cost(orders):
        weigh = lambda w, a: (3 if a.stage == 0 else 1) * (2 if a.kind == "backward" else 1)  # noqa: E731
        return simulate(orders, seconds=weigh).makespan

    even, uneven = cost(plain("1f1b", 2, 24)), cost(replicas.orders("1f1b", (3, 1), 24))
    assert even / uneven > 2.6
    by_speed = replicas.orders("1f1b", (2, 1), 24, seconds=[[1.0, 3.0], [0.7]])
    alike = replicas.orders("1f1b", (2, 1), 24)
    pace = lambda w, a: [1.0, 3.0, 0.7][w] * (2 if a.kind == "backward" else 1)  # noqa: E731
    assert simulate(alike, seconds=pace).makespan / simulate(by_speed, seconds=pace).makespan > 1.5
