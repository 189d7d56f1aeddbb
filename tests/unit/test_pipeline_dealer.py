"""Shares that follow what micro-batches take: learned by all alike, not from noise, and forgotten with a lost step."""

from __future__ import annotations

import random

import pytest

from echelon.parallel.pipeline.bubble import simulate
from echelon.parallel.pipeline.dealer import Dealer
from echelon.parallel.pipeline.schedule import plain


def counts(dealer, micros):
    return [len({a.micro for a in order}) for order in dealer.orders(micros)]


@pytest.mark.case("pipeline: micro-batches dealt to unequal workers")
def test_a_slow_worker_gets_less_as_soon_as_it_was_seen():
    dealer = Dealer("1f1b", (2, 1))
    assert counts(dealer, 8) == [4, 4, 8]
    assert not dealer.learn(8, [9.0, 9.0, 9.0]), "the first step is warming up"
    assert dealer.learn(8, [1.0, 3.0, 0.7])
    assert counts(dealer, 8) == [6, 2, 8]
    assert not dealer.learn(8, [1.0, 3.0, 0.7])
    assert counts(dealer, 4) == [3, 1, 4], "and in a last, shorter batch"


def test_noise_changes_nothing():
    dealer, draw = Dealer("1f1b", (3, 1)), random.Random(1)
    changed = [dealer.learn(12, [1 + draw.uniform(-0.1, 0.1) for _ in range(3)] + [0.3]) for _ in range(200)]
    assert not any(changed)


def test_a_worker_that_has_nothing_to_do_keeps_its_last_time():
    dealer = Dealer("1f1b", (2, 1))
    dealer.learn(4, [1, 1, 1])
    assert dealer.learn(4, [1.0, 50.0, 0.5])
    assert counts(dealer, 4) == [4, 0, 4]
    assert not dealer.learn(4, [1.0, 0.0, 0.5])
    assert counts(dealer, 4) == [4, 0, 4]


def test_all_ranks_come_to_the_same_lists_and_a_lost_step_forgets():
    draw = random.Random(3)
    one, other = Dealer("1f1b", (3, 1)), Dealer("1f1b", (3, 1))
    for _ in range(30):
        seconds = [draw.uniform(0.5, 3) for _ in range(4)]
        assert one.learn(9, seconds) == other.learn(9, seconds)
        assert one.orders(9) == other.orders(9)
    one.put_back()
    assert one.orders(9) == Dealer("1f1b", (3, 1)).orders(9)


def test_with_one_worker_a_stage_nothing_is_learned():
    dealer = Dealer("interleaved", (1, 1), 2)
    assert not any(dealer.learn(4, [1.0, 9.0]) for _ in range(5))
    assert dealer.orders(4) == plain("interleaved", 2, 4, 2)


def test_learned_shares_make_steps_shorter():
    true = [1.0, 3.0, 3.0, 0.4]
    dealer = Dealer("1f1b", (3, 1))

    def step():
        orders = dealer.orders(24)
        pace = lambda w, a: true[w] * (2 if a.kind == "backward" else 1) / 3  # noqa: E731
        dealer.learn(24, [s if o else 0.0 for s, o in zip(true, orders, strict=True)])
        return simulate(orders, seconds=pace).makespan

    taken = [step() for _ in range(6)]
    assert taken[0] / taken[-1] > 1.5


def test_named_shares_stay_whatever_is_measured():
    dealer = Dealer("1f1b", (3, 1), speeds=((2, 1, 1), (1,)))

    def counts():
        return [len({a.micro for a in order}) for order in dealer.orders(8)]

    assert counts() == [4, 2, 2, 8]
    before = dealer.orders(8)
    for _ in range(5):
        assert not dealer.learn(8, [9.0, 0.1, 0.1, 1.0])
    dealer.put_back()
    assert dealer.orders(8) == before
    even = Dealer("1f1b", (3, 1), speeds=((1, 1, 1), (1,)))
    assert even.orders(7) == Dealer("1f1b", (3, 1)).orders(7)
