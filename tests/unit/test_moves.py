"""What a rank sends in a step, from sizes alone."""

from __future__ import annotations

import pytest

from echelon.mesh import moves
from echelon.mesh.moves import Crossing, Sharded

MIB = 1 << 20


@pytest.mark.parametrize(
    ("verb", "ranks", "each"),
    [
        ("all_reduce", 1, 0.0), ("all_reduce", 2, 1.0), ("all_reduce", 4, 1.5),
        ("reduce_scatter", 4, 3.0), ("all_gather", 4, 3.0), ("broadcast", 4, 0.75), ("reduce", 2, 0.5),
        ("gather", 4, 0.75), ("scatter", 4, 0.75), ("barrier", 8, 0.0),
    ],
)  # fmt: skip
def test_an_operation_counts_as_what_must_reach_others_dealt_evenly(verb, ranks, each):
    assert moves.factor(verb, ranks) == each


def test_a_scattered_sum_and_a_gathering_of_it_send_what_one_all_reduce_sends():
    whole, ranks = 12 * MIB, 3
    parts = whole / ranks * (moves.factor("reduce_scatter", ranks) + moves.factor("all_gather", ranks))
    assert parts == moves.all_reduced(whole, ranks)


@pytest.mark.parametrize(
    ("model", "times"),
    [
        (Sharded(level=1, split=MIB, ranks=4), 1.5 + 0.75),  # summed; new values to all
        (Sharded(level=2, split=MIB, ranks=4), 0.75 + 0.75),  # gathered; summed in parts
        (Sharded(level=3, split=MIB, ranks=4), 3 * 0.75),  # … and gathered again for backward
        (Sharded(level=3, split=MIB, outermost=MIB, ranks=4), 2 * 0.75),
        (Sharded(level=2, split=MIB, ranks=2, copies=2), 0.5 + 0.5 + 0.5),  # parts are summed among copies
        (Sharded(level=3, split=MIB, ranks=4, micros=3), 3 * 3 * 0.75),
        (Sharded(level=1, split=MIB, ranks=4, micros=3), 1.5 + 0.75),  # gradients of micro-batches stay here
        (Sharded(level=2, split=MIB, ranks=1), 0.0),
    ],
)
def test_what_sharded_sends(model, times):
    assert moves.sharded(model) == times * MIB


def test_servers_take_and_give_or_sum_a_share():
    assert moves.pushed(3 * MIB, 4 * MIB) == 7 * MIB
    assert moves.summed(8 * MIB, 0.0, 4) == moves.all_reduced(8 * MIB, 4)
    assert moves.summed(8 * MIB, 1.0, 4) == 16 * MIB
    assert moves.summed(8 * MIB, 0.5, 2) == 8 * MIB + 4 * MIB


def test_a_stage_sends_what_it_makes_for_others_and_the_gradients_of_what_it_took():
    crossings = [Crossing(0, 1, 100, True), Crossing(1, 2, 40, True), Crossing(0, 2, 8, False)]
    found = [moves.piped(crossings, [0, 1, 2], place, 5) for place in range(3)]
    assert found == [5 * 108, 5 * (100 + 40), 5 * 40]


def test_values_between_two_stages_of_one_worker_do_not_travel():
    crossings = [Crossing(0, 1, 100, True), Crossing(1, 2, 100, True), Crossing(0, 2, 7, True)]
    assert moves.piped(crossings, [0, 1, 0], 0, 1) == 200
    assert moves.piped(crossings, [0, 1, 0], 1, 1) == 200
