"""update=local: who may go on after a meeting, what copies weigh in it, and what a server makes of them."""

from __future__ import annotations

import pytest
import torch

from echelon.errors import UsageError
from echelon.ps.meetings import Place, verdict, weights
from echelon.ps.outer import Outer, runs_of
from echelon.ps.owned import outer_recipe

STEPPING, WAITING = False, True


@pytest.mark.case("ps,update=local: who goes on after a meeting")
@pytest.mark.parametrize(
    ("places", "passed", "ended"),
    [
        ([(0, STEPPING, 0), (0, STEPPING, 0)], 0, False),
        ([(1, WAITING, 0), (0, STEPPING, 0)], 0, False),
        ([(1, WAITING, 0), (1, WAITING, 0)], 1, False),
        ([(1, WAITING, 0), (2, WAITING, 0)], 1, False),  # one left its loop in the middle
        ([(1, WAITING, 0), (1, STEPPING, 0)], 1, False),  # … and takes steps again
        ([(1, WAITING, 1), (0, STEPPING, 0)], 0, False),
        ([(1, WAITING, 1), (1, WAITING, 0)], 1, True),
        ([(1, WAITING, 1), (2, WAITING, 0)], 1, True),
        ([(3, STEPPING, 1), (3, STEPPING, 1)], 3, False),
    ],
)
def test_a_worker_goes_on_when_nobody_is_at_an_earlier_place(places, passed, ended):
    told = verdict([Place(*place) for place in places])
    assert (told.passed, told.ended, told.stop) == (passed, ended, any(stop for *_, stop in places))
    assert told.reason


def test_a_place_travels_as_three_numbers():
    place = Place(7, True, False)
    assert Place.from_plain(place.to_plain()) == place
    for wrong in (None, [1, 2], "abcd", [None, 0, 0]):
        with pytest.raises((TypeError, ValueError)):
            Place.from_plain(wrong)


def test_copies_weigh_their_samples():
    assert weights([6, 2, 0]) == [0.75, 0.25, 0.0]
    assert weights([0, 0]) == [0.0, 0.0]


def bits(*values):
    return torch.cat([v.view(torch.uint8) for v in values])


def test_neighbours_of_one_type_and_kind_are_one_run():
    ranges = [
        [0, 3, "float32", "outer"],
        [64, 5, "float32", "outer"],
        [128, 2, "float64", "outer"],
        [192, 4, "float64", "mean"],
    ]
    found = [(r.begin, r.end, r.kind) for r in runs_of(ranges, 256)]
    assert found == [(0, 84, "outer"), (128, 144, "outer"), (192, 224, "mean")]
    for wrong in (
        [0, 3, "int8", "outer"],
        [1, 3, "float32", "outer"],
        [0, 99, "float32", "outer"],
        [0, 3, "float32", "x"],
    ):
        with pytest.raises(UsageError):
            runs_of([wrong], 64)
    with pytest.raises(UsageError):
        runs_of([[64, 1, "float32", "outer"], [0, 1, "float32", "outer"]], 128)


def test_equal_copies_have_themselves_as_their_mean_to_the_bit():
    x = torch.randn(16)
    held = Outer([[0, 16, "float32", "outer"]], bits(torch.zeros(16)), None)
    held.meet([(bits(x), 1 / 3), (bits(x), 1 / 3), (bits(x), 1 / 3)])
    assert torch.equal(held.memory, bits(x))


def test_an_outer_optimizer_is_torchs_and_its_momentum_goes_to_another_server():
    start, copies = (
        torch.randn(16, dtype=torch.float64),
        [torch.randn(16, dtype=torch.float64) for _ in range(4)],
    )
    param = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([param], lr=0.7, momentum=0.9, nesterov=True)
    ranges, recipe = [[0, 16, "float64", "outer"]], outer_recipe("diloco", 0.7, 0.9)
    held = Outer(ranges, bits(start), recipe)
    assert held.momentum() is None
    for n, copy in enumerate(copies):
        if n == 2:
            held = Outer(ranges, held.memory, recipe, held.momentum())
        param.grad = param.detach() - copy
        optimizer.step()
        held.meet([(bits(copy), 1.0)])
        assert torch.allclose(held.memory.view(torch.float64), param.detach(), rtol=0, atol=1e-14)


def test_what_is_averaged_only_takes_no_outer_step():
    ranges = [[0, 8, "float64", "outer"], [64, 8, "float64", "mean"]]
    held = Outer(ranges, bits(torch.zeros(16, dtype=torch.float64)), outer_recipe("diloco", 0.5, 0.0))
    held.meet([(bits(torch.ones(16, dtype=torch.float64)), 1.0)])
    assert held.memory.view(torch.float64).tolist() == [0.5] * 8 + [1.0] * 8


def test_deltas_are_added_by_their_share():
    held = Outer([[0, 16, "float32", "outer"]], bits(torch.ones(16)), None)
    held.add(bits(torch.full((16,), 4.0)), 0.25)
    assert held.memory.view(torch.float32).tolist() == [2.0] * 16
    with pytest.raises(UsageError):
        held.check(torch.zeros(8))
