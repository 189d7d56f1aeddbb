"""What workers log, averaged by step."""

from __future__ import annotations

import math

from echelon.elastic.meter import KEEP_STEPS, MAX_OPEN, Meter, mean
from echelon.events import Logged, Metric

BOTH = frozenset({0, 1})


def logged(rank: int, step: int, weight: float = 1.0, **values: float) -> Logged:
    return Logged(rank=rank, step=step, values=values, weight=weight)


def told(metrics: list[Metric]) -> list[tuple[int, dict[str, float]]]:
    return [(m.step, dict(m.values)) for m in metrics]


def test_a_step_leaves_when_every_worker_logged_it_weighted_by_samples():
    meter = Meter()
    assert meter.add(logged(0, 1, weight=3.0, loss=1.0), BOTH) == []
    assert told(meter.add(logged(1, 1, weight=1.0, loss=5.0), BOTH)) == [(1, {"loss": 2.0})]
    assert meter.finish() == []


def test_the_order_of_arrival_does_not_change_a_bit():
    parts = {0: (0.1, 3.0), 1: (0.2, 5.0), 2: (0.7, 7.0)}
    assert mean(parts) == mean(dict(reversed(parts.items())))


def test_a_worker_without_samples_counts_for_nothing():
    assert mean({0: (2.0, 4.0), 1: (math.nan, 0.0)}) == 2.0
    assert mean({0: (1.0, 0.0), 1: (3.0, 0.0)}) == 2.0


def test_names_meet_apart_and_repeats_meet_in_order():
    meter = Meter()
    assert meter.add(logged(0, 1, loss=1.0), BOTH) == []
    assert meter.add(logged(0, 1, loss=2.0), BOTH) == []
    assert told(meter.add(logged(1, 1, loss=3.0, accuracy=1.0), BOTH)) == [(1, {"loss": 2.0})]
    assert told(meter.add(logged(1, 1, loss=4.0), BOTH)) == [(1, {"loss": 3.0})]
    assert told(meter.finish()) == [(1, {"accuracy": 1.0})]


def test_a_step_that_is_old_leaves_with_what_it_has_and_a_late_part_is_dropped():
    meter = Meter()
    meter.add(logged(0, 1, loss=1.0), BOTH)
    assert meter.add(logged(0, KEEP_STEPS, loss=2.0), BOTH) == []
    assert meter.add(logged(0, 1 + KEEP_STEPS, loss=3.0), BOTH) == []
    assert told(meter.add(logged(1, 1 + KEEP_STEPS, loss=5.0), BOTH)) == [
        (1, {"loss": 1.0}),
        (1 + KEEP_STEPS, {"loss": 4.0}),
    ]
    assert meter.add(logged(1, 1, loss=9.0), BOTH) == []
    assert told(meter.finish()) == [(KEEP_STEPS, {"loss": 2.0})]


def test_when_a_worker_is_gone_the_others_are_not_held_up():
    meter = Meter()
    meter.add(logged(0, 1, loss=1.0), BOTH)
    meter.add(logged(0, 2, loss=2.0), BOTH)
    assert told(meter.settle(frozenset({0}))) == [(1, {"loss": 1.0}), (2, {"loss": 2.0})]


def test_what_waits_is_bounded():
    meter = Meter()
    left = sum(len(meter.add(logged(0, 1, **{f"n{i}": 1.0}), BOTH)) for i in range(MAX_OPEN + 10))
    assert left >= 1
    assert meter._num_open <= MAX_OPEN
    many = sum(len(meter.add(logged(0, 2, same=1.0), BOTH)) for _ in range(3))
    assert many == 0
    meter.finish()
    assert meter._num_open == 0
