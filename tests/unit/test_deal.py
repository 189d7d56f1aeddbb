"""Dealing is pure: tables and properties."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echelon.data.deal import Cut, micros, part


def test_parts_are_contiguous_and_differ_by_at_most_one():
    assert [part(7, r, 3) for r in range(3)] == [(0, 3), (3, 5), (5, 7)]
    assert [part(2, r, 4) for r in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]


batches = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(batches, st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_every_sample_is_dealt_once_and_weights_sum_to_one(sizes, size, accumulate, microbatches, per_worker):
    ids, order = iter(range(1000)), []
    for n in sizes:
        order.append([next(ids) for _ in range(n)])
    cut = Cut(0, size, accumulate, microbatches, per_worker)
    steps = list(micros(order, 0, cut))
    dealt = [[micro.ids[slice(*micro.dealt(r, size))] for r in range(size)] for micro in steps]
    flat = [i for parts in dealt for p in parts for i in p]
    assert sorted(flat) == sorted(i for b in order for i in b)
    for micro, parts in zip(steps, dealt, strict=True):
        assert [i for p in parts for i in p] == list(micro.ids)
    group, total = 0.0, 0
    for micro in steps:
        group += sum(len(micro.ids[slice(*micro.dealt(r, size))]) for r in range(size)) / micro.total
        total += len(micro.ids)
        if micro.last:
            assert abs(group - 1.0) < 1e-12
            assert total == micro.total
            group, total = 0.0, 0
    assert steps[-1].last


@given(batches, st.integers(1, 4), st.integers(1, 4))
def test_slices_hold_the_same_samples_at_any_world_size(sizes, accumulate, microbatches):
    order = [list(range(10 * i, 10 * i + n)) for i, n in enumerate(sizes)]
    lists = [[(m.batch, m.slice, list(m.ids), m.total, m.last) for m in micros(order, 0, Cut(0, w, accumulate, microbatches))]
             for w in (1, 2, 5)]  # fmt: skip
    assert lists[0] == lists[1] == lists[2]


def test_an_empty_epoch_has_no_steps():
    assert list(micros([], 0, Cut())) == []


def test_per_worker_gives_each_worker_a_whole_batch_and_nothing_to_those_left_over():
    steps = list(micros([[0, 1], [2, 3], [4]], 0, Cut(0, 2, per_worker=True)))
    assert [[list(m.ids[slice(*m.dealt(r, 2))]) for r in range(2)] for m in steps] == [
        [[0, 1], [2, 3]],
        [[4], []],
    ]
    assert [m.total for m in steps] == [4, 1]
