"""Gradients that are not finite: the decision, what is said of it, and how they are found."""

from __future__ import annotations

import math
import random

import pytest
import torch

from echelon.errors import NotFinite
from echelon.parallel import finite
from echelon.ps import looking
from echelon.ps.judge import Summary, Whole, whole
from echelon.strategy import merge, parse, require_whole
from echelon.verdict import Make, Refuse, Skip, Suspect, error, from_plain, to_plain, told, verdict

ONE = [Suspect(1, "head.weight"), Suspect(1, "head.bias")]


@pytest.mark.case("nonfinite: the decision")
@pytest.mark.parametrize(
    ("rule", "ok", "suspects", "expected"),
    [
        ("pass", True, [], Make()),
        ("skip", True, [], Make()),
        ("refuse", True, [], Make()),
        ("pass", False, [], Make("the gradient is not finite, and nonfinite=pass")),
        ("skip", False, ONE, Skip("the gradient of worker 1 is not finite: `head.weight` and 1 more parameter")),
        ("refuse", False, [], Refuse("the gradient is not finite", ())),
        ("refuse", False, [Suspect(-1, "a")], Refuse("the gradient is not finite: `a`", ())),
        ("refuse", False, [Suspect(2, "a"), Suspect(0, "a")], Refuse("the gradient of worker 0, 2 is not finite: `a`", (0, 2))),
    ],
)  # fmt: skip
def test_what_becomes_of_an_update(rule, ok, suspects, expected):
    assert verdict(rule, ok, suspects) == expected


def test_a_copy_is_told_of_as_one():
    assert told(ONE, "copy").startswith("the copy of worker 1 is not finite")


@pytest.mark.parametrize(
    ("rank", "workers", "consequence"), [(1, (1,), False), (0, (1,), True), (0, (), False)]
)
def test_who_did_not_cause_it_says_so(rank, workers, consequence):
    raised = error(Refuse("the gradient of worker 1 is not finite", workers), 7, rank)
    assert isinstance(raised, NotFinite)
    assert (raised.step, raised.rank, raised.peers, raised.consequence) == (7, rank, workers, consequence)
    assert "step 7: the gradient of worker 1" in raised.message
    assert "nonfinite=skip" in raised.remedy


def test_suspects_travel_as_plain_data_and_are_not_many():
    many = [(worker, key) for worker in range(9) for key in range(9)]
    assert len(from_plain(to_plain(many))) == 8
    assert from_plain(to_plain([(1, 3), (1, 3), (-1, 2)])) == [(-1, 2), (1, 3)]


@pytest.mark.parametrize("form", ["allreduce", "ps", "ps,apply=server", "ps,update=bounded,staleness=2", "ps,update=async", "ps,backup=1", "ps,update=local"])  # fmt: skip
def test_every_form_takes_the_field(form):
    require_whole(merge(parse(f"{form},nonfinite=skip")))


# how they are found


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_one_element_is_found_and_named(dtype, wrong):
    tensors = [torch.ones(3, 5, dtype=dtype), torch.zeros(0, dtype=dtype), torch.ones(70, dtype=dtype)]
    assert finite.finite(tensors)
    tensors[2][69] = wrong
    assert not finite.finite(tensors)
    assert finite.broken(tensors) == [2]


def test_large_numbers_whose_squares_overflow_are_finite():
    assert finite.finite([torch.full((8,), 3e38), torch.full((8,), 1e300, dtype=torch.float64)])


def test_sparse_gradients_are_looked_at():
    rows = torch.sparse_coo_tensor([[1, 4]], torch.tensor([[1.0], [NAN]]), (6, 1), check_invariants=True)
    assert not finite.finite([rows])
    assert finite.broken([torch.ones(2), rows]) == [1]


# on servers


def test_a_server_names_whose_part_of_which_range_it_was():
    parts = {0: {3: torch.ones(2), 4: torch.ones(2)}, 1: {3: torch.tensor([1.0, NAN]), 4: torch.ones(2)}}
    sums = {key: parts[0][key] + parts[1][key] for key in (3, 4)}
    found = looking.summed(sums, parts)
    assert (found.finite, list(found.whose)) == (False, [(1, 3)])
    large = {w: {5: torch.full((2,), 3e38)} for w in (0, 1)}
    found = looking.summed({5: large[0][5] + large[1][5]}, large)
    assert (found.finite, list(found.whose)) == (False, [(-1, 5)])
    found = looking.summed({6: torch.full((1,), 1e200, dtype=torch.float64)}, {})
    assert found.finite  # though its square is not


@pytest.mark.case("ps: NaN verdict and clip factor are global")
@pytest.mark.parametrize(
    ("rule", "skips", "refused"), [("pass", False, False), ("skip", True, False), ("refuse", True, True)]
)
def test_one_server_with_a_gradient_that_is_not_finite_decides_for_all(rule, skips, refused):
    found = whole({0: Summary([9.0]), 1: Summary([INF], False, [(2, 7)])})
    decided, refusal = looking.decided(found, rule, 0.0)
    assert (decided.skips, refusal is not None) == (skips, refused)
    assert not skips or decided.whose == ((2, 7),)
    assert refusal is None or refusal.workers == (2,)


def test_the_clip_factor_is_that_of_the_norm_over_all_ranges():
    found = whole({0: Summary([9.0]), 1: Summary([16.0])})
    assert looking.decided(found, "refuse", 2.5)[0].factor == 2.5 / (5.0 + 1e-6)
    assert looking.decided(Whole(4.0), "refuse", 2.5)[0].factor == 1.0
    assert math.isnan(looking.decided(whole({0: Summary([NAN], False)}), "pass", 2.5)[0].factor)


def test_the_clip_factor_does_not_depend_on_how_ranges_lie():
    squares = [random.Random(3).expovariate(1e-3) for _ in range(50)]
    ways = [dict(enumerate(Summary([s]) for s in order)) for order in (squares, reversed(squares))]
    assert len({looking.decided(whole(told), "pass", 1.0)[0].factor for told in ways}) == 1


@pytest.mark.parametrize(
    ("clip_norm", "rule", "servers", "expected"),
    [(0.0, "pass", 3, False), (1.0, "pass", 1, False), (1.0, "pass", 2, True), (0.0, "skip", 1, True), (0.0, "refuse", 2, True)],
)  # fmt: skip
def test_nothing_is_looked_at_that_nobody_asked_for(clip_norm, rule, servers, expected):
    assert looking.needed(clip_norm, rule, servers) is expected
