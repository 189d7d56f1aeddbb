"""Dealing is pure: tables and properties."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echelon.data.deal import Cut, Done, Picker, micros, num_pieces, part, pieces


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


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_pieces_hold_every_sample_once_and_their_number_is_known(
    samples, size, accumulate, each, microbatches
):
    order = [list(range(lo, min(lo + size, samples))) for lo in range(0, samples, size)]
    cut = Cut(accumulate=accumulate, pieces=each, microbatches=microbatches)
    found = list(pieces(order, 0, cut))
    assert sorted(i for micros_ in found for m in micros_ for i in m.ids) == list(range(samples))
    assert [m.batch for micros_ in found for m in micros_[-1:]] == list(range(len(found)))
    assert all(micros_[0].total == sum(len(m.ids) for m in micros_) for micros_ in found)
    assert all([m.last for m in micros_] == [False] * (len(micros_) - 1) + [True] for micros_ in found)
    assert num_pieces(len(order), size, len(order[-1]), cut) == len(found)


def test_what_is_left_of_an_epoch_can_be_cut_in_another_way():
    order = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    done = Done(accumulate=1, pieces=2, low=1, above=(3, 4))  # [0, 1] and [6, 7] and [8] are done
    assert list(done.rest(order)) == [[2, 3], [4, 5], [9]]
    assert list(Done(low=2).rest(order)) == [[8, 9]]


class Numbers:
    """Takes (data.deal.Takes) of a script: these pieces, then none."""

    over, low = False, 0

    def __init__(self, *numbers):
        self.numbers, self.total = list(numbers), None

    def take(self, wait):
        self.over = not self.numbers
        return self.numbers.pop(0) if self.numbers else None

    def ended(self, total):
        self.total = total


def test_a_piece_that_others_gave_back_is_found_again():
    takes = Numbers(3, 1, 4, 7)
    picker = Picker(iter("abcde"), takes)
    assert [picker.pick(True) for _ in range(4)] == ["d", "b", "e", None]
    assert takes.total == 5
    assert picker.first == "a"


def test_pieces_that_nobody_can_give_back_are_forgotten():
    takes = Numbers(0, 3, 4)
    picker = Picker(iter("abcde"), takes)
    picker.pick(True)
    takes.low = 3
    picker.pick(True)
    assert sorted(picker.passed) == [3]
