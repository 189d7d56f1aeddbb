"""Runs of elements: cut, laid over each other, and checked to cover a tensor once, always as one element at a time would give it."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.mesh.layout import Runs
from echelon.mesh.runs import cut, overlaps, uncovered
from tests.layouts import along, grid, index, names, packed, stretches

some_runs = st.builds(
    lambda start, length, gap, count: Runs(start, length, length + gap, count),
    st.integers(0, 30), st.integers(1, 8), st.integers(0, 9), st.integers(1, 7),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(some_runs, max_size=3), st.data())
def test_a_cut_holds_the_elements_between_in_their_order(runs, data):
    elements = torch.cat([index(run) for run in runs]) if runs else torch.arange(0)
    start = data.draw(st.integers(0, len(elements)))
    stop = data.draw(st.integers(start, len(elements)))
    at, pieces = start, list(cut(runs, start, stop))
    for place, piece in pieces:
        assert place == at
        assert torch.equal(index(piece), elements[at : at + piece.numel])
        at += piece.numel
    assert at == stop
    assert len(pieces) <= 3 * len(runs)


def common(one, other):
    """Pairs (place in one, place in the other) of what both hold, one element at a time."""
    where = {int(e): i for i, e in enumerate(index(other))}
    return {(i, where[int(e)]) for i, e in enumerate(index(one)) if int(e) in where}


@settings(max_examples=500, deadline=None)
@given(some_runs, some_runs, st.booleans())
def test_overlaps_are_the_elements_that_both_hold_each_once(one, other, same_period):
    if same_period and one.count > 1 and other.length <= one.period:
        other = Runs(other.start, other.length, one.period, other.count)
    found = [
        (p.at + row * p.step + k, p.other_at + row * p.other_step + k)
        for p in overlaps(one, other) for row in range(p.count) for k in range(p.length)
    ]  # fmt: skip
    assert len(found) == len(set(found))
    assert set(found) == common(one, other)


def test_what_lies_alike_takes_few_patches_however_many_rows():
    left = Runs(0, 500, 1000, 10**9)
    assert len(list(overlaps(left, Runs(250, 500, 1000, 10**9)))) <= 2
    assert len(list(overlaps(left, Runs(10**6 + 3, 10**9)))) <= 3
    assert len(list(cut([left], 10**6 + 3, 10**10))) <= 3


LAYOUTS = names()


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_covers_its_tensor_once_and_less_or_more_of_it_does_not(name):
    shape = (12, 10)
    make, _ = LAYOUTS[name]
    pieces = [run for runs in {p.runs for p in make(shape)} for run in runs]
    assert uncovered(120, pieces) == ""
    for gone in range(len(pieces)):
        rest = pieces[:gone] + pieces[gone + 1 :]
        assert "in none" in uncovered(120, rest)
        assert uncovered(120, [*pieces, pieces[gone]])
    assert uncovered(121, pieces)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_cover_is_what_counting_each_element_says(data):
    """Layouts cut anywhere, and sometimes damaged."""
    rows, columns = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8))
    down, across = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    pieces = []
    for placed in grid((rows, columns), down, across):
        at = sorted({0, placed.numel, *data.draw(st.lists(st.integers(0, placed.numel), max_size=2))})
        for a, b in itertools.pairwise(at):
            pieces += [piece for _, piece in cut(placed.runs, a, b)]
    pieces = data.draw(st.permutations(pieces))
    if pieces and data.draw(st.booleans()):
        n = data.draw(st.integers(0, len(pieces) - 1))
        one = pieces[n]
        change = data.draw(st.sampled_from(["start", "length", "count", "gone"]))
        by = data.draw(st.sampled_from([-1, 1]))
        new = Runs(
            one.start + by * (change == "start"),
            one.length + by * (change == "length"),
            one.period,
            one.count + by * (change == "count"),
        )
        pieces = [*pieces[:n], *([] if change == "gone" else [new]), *pieces[n + 1 :]]
    numel = rows * columns
    sane = all(p.start >= 0 and p.length >= 0 and p.count >= 1 for p in pieces)
    sane = sane and all(p.count == 1 or 0 < p.length <= p.period for p in pieces)
    elements = torch.cat([index(p) for p in pieces]) if pieces and sane else torch.arange(0)
    sane = sane and (not len(elements) or int(elements.max()) < numel)
    right = sane and torch.equal(elements.sort().values, torch.arange(numel))
    assert (uncovered(numel, pieces) == "") == right


def test_a_billion_rows_are_checked_at_once():
    shape = (10**9, 4096)
    pieces = [p.runs[0] for p in along(shape, 8, 1)]
    cuts = [
        piece
        for r in pieces
        for a, b in ((0, 10**9 + 7), (10**9 + 7, r.numel))
        for _, piece in cut([r], a, b)
    ]
    began = time.monotonic()
    assert uncovered(10**9 * 4096, pieces) == ""
    assert uncovered(10**9 * 4096, cuts) == ""
    assert "in two" in uncovered(10**9 * 4096, [*cuts[:-1], cuts[-1], Runs(10**12, 5)])
    assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    ("numel", "pieces"),
    [
        (10**15, [Runs(0, 1, 2, 5 * 10**14), Runs(1, 1, 4, 25 * 10**13), Runs(3, 1, 4, 25 * 10**13)]),
        (10**12, [Runs(0, 1, 3, 10**11), Runs(1, 2, 3, 10**11 - 1)]),
        (6 * 10**9, [Runs(0, 2, 6, 10**9), Runs(2, 1, 3, 2 * 10**9), Runs(3, 2, 6, 10**9)]),
        (100, [Runs(0, 100, 0, 5)]),
        (100, [Runs(0, 10, 5, 3)]),
        (100, [Runs(0, -5), Runs(0, 100)]),
        (100, [Runs(0, 0, 0, 10**9)]),
        (100, [Runs(0, 50, 60, 2), Runs(50, 10)]),
    ],
)
def test_pieces_that_nobody_sane_would_write_cost_no_time(numel, pieces):
    began = time.monotonic()
    why = uncovered(numel, pieces)
    assert why
    assert time.monotonic() - began < 0.5


def test_many_pieces_are_checked_in_time_that_grows_with_them():
    """Each of 64 column shards, written by 16 copies that each cut it elsewhere."""
    pieces = []
    for r in along((4096, 4096), 64, 1):
        at = [r.numel * k // 16 + 3 * (0 < k < 16) for k in range(17)]
        for a, b in itertools.pairwise(at):
            pieces += [p for _, p in cut(r.runs, a, b)]
    began = time.monotonic()
    assert uncovered(4096 * 4096, pieces) == ""
    assert time.monotonic() - began < 3, len(pieces)


def test_packed_heads_and_stretches_are_laid_over_each_other():
    shape = (12, 4)
    for mine in packed(shape, 2):
        met = 0
        for theirs in stretches(shape, 5):
            for a in mine.runs:
                for b in theirs.runs:
                    met += sum(p.length * p.count for p in overlaps(a, b))
        assert met == mine.numel
