"""Sums over a model that several ranks hold together: clipping, and what is not finite, the same as in one process."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from echelon.comm.threads import Room
from echelon.errors import PeerLost
from echelon.mesh.layout import Placed, Runs
from echelon.parallel import clip
from echelon.parallel.average import Average
from echelon.prepare.keep import Tensors
from tests.checkpoint_ranks import together
from tests.layouts import along, grid, here, packed, staged, stretches
from tests.runs import SplitModel

SHAPES = {"a": (6, 8), "b": (9, 4), "c": (7,), "scale": ()}


def whole(dtype=torch.float64, factor=1.0):
    torch.manual_seed(1)
    return {name: torch.randn(shape).to(dtype) * factor for name, shape in SHAPES.items()}


def twice(shape, size):
    """Tied: held by the first and the last rank, counted on the first."""
    every = (Runs(0, math.prod(shape)),)
    ends = (0, size - 1)
    return [Placed(shape, every if r in ends else (), ends, counts=r == 0) for r in range(size)]


LAYOUTS = {
    "rows": lambda name, shape, size: along(shape, size, 0) if shape else None,
    "columns": lambda name, shape, size: along(shape, size, 1) if len(shape) == 2 else None,
    "heads": lambda name, shape, size: packed(shape, size) if shape and shape[0] % 3 == 0 else None,
    "stages": lambda name, shape, size: staged(shape, size, list(SHAPES).index(name) % size),
    "tied": lambda name, shape, size: twice(shape, size) if name == "a" else staged(shape, size, 1),
    "stretches": lambda name, shape, size: stretches(shape, size),
    "grid": lambda name, shape, size: grid(shape, size, 1) if len(shape) == 2 else None,
}


def held(layout, size, rank, group, grads):
    """Parameters as they lie on a rank, with their gradients, and how."""
    params, placed = [], {}
    for name, grad in grads.items():
        lies = LAYOUTS[layout](name, tuple(grad.shape), size)
        if lies is None:
            param = nn.Parameter(torch.zeros_like(grad))
            param.grad = grad.clone()
        elif not lies[rank].runs:
            param = nn.Parameter(torch.zeros((), dtype=grad.dtype).expand(grad.shape))
        else:
            param = nn.Parameter(torch.zeros(lies[rank].numel, dtype=grad.dtype))
            param.grad = here(grad, lies[rank])
        if lies is not None:
            placed[id(param)] = lies[rank]
        params.append(param)
    return SplitModel(params, placed, group)


@pytest.mark.case("a norm over pieces is the norm")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_the_norm_and_the_clipped_gradients_are_those_of_one_process(layout, size, dtype, close):
    grads = whole(dtype)
    alone = [nn.Parameter(torch.zeros_like(g)) for g in grads.values()]
    for p, g in zip(alone, grads.values(), strict=True):
        p.grad = g.clone()
    right = float(torch.nn.utils.get_total_norm(list(grads.values())))
    clip.clip_norm(alone, right / 3)
    groups = Room(size).groups()

    def act(rank):
        model = held(layout, size, rank, groups[rank], grads)
        norm = model.clip_norm(right / 3)
        assert norm.dtype == dtype
        for mine, whole_param in zip(model.params, alone, strict=True):
            if mine.grad is not None:
                placed = model.lies.get(id(mine))
                wanted = whole_param.grad if placed is None else here(whole_param.grad, placed)
                assert torch.allclose(mine.grad, wanted, rtol=close, atol=0)
        return norm.item()

    norms = together(size, act)
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(right, rel=close)


def test_a_gradient_within_bounds_is_left_alone_bit_for_bit():
    groups, grads = Room(2).groups(), whole()

    def act(rank):
        model = held("rows", 2, rank, groups[rank], grads)
        before = [p.grad.clone() for p in model.params]
        model.clip_norm(1e9)
        assert all(torch.equal(p.grad, b) for p, b in zip(model.params, before, strict=True))

    together(2, act)


def test_a_rank_without_any_gradient_takes_part():
    groups, grads = Room(3).groups(), {"b": whole()["b"]}

    def act(rank):
        return held("stages", 3, rank, groups[rank], grads).clip_norm(1.0).item()

    assert together(3, act) == pytest.approx([grads["b"].norm().item()] * 3)


def test_a_float32_norm_that_would_overflow_does_not():
    groups, grads = Room(2).groups(), whole(torch.float32, factor=1e30)

    def act(rank):
        return held("rows", 2, rank, groups[rank], grads).clip_norm(1.0).item()

    exact = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
    assert together(2, act) == pytest.approx([exact] * 2, rel=1e-6)


def test_values_are_clipped_where_they_are():
    model = held("columns", 2, 1, None, whole())
    clip.clip_value(model.params, 0.1)
    assert max(float(p.grad.abs().max()) for p in model.params) == 0.1
    assert model.asks_nobody


def test_what_is_not_finite_on_one_rank_is_so_for_the_model_and_is_named():
    groups = Room(3).groups()
    grads = whole()
    grads["b"][2, 1] = math.nan

    def act(rank):
        model = held("rows", 3, rank, groups[rank], grads)
        fine = [bool(p.grad.isfinite().all()) for p in model.params]
        assert model.all_finite(all(fine)) is False
        wrong = model.not_finite([p for p, ok in zip(model.params, fine, strict=True) if not ok])
        assert [p is model.params[1] for p in wrong] == [True]
        assert model.all_finite(True) is True
        return all(fine)

    assert together(3, act) == [False, True, True]


def test_a_scaler_finds_the_same_infinities_on_all_ranks():
    groups = Room(2).groups()

    def act(rank):
        found = {"cpu": torch.tensor(float(rank == 1))}
        held("rows", 2, rank, groups[rank], whole()).scaler_found(found)
        return found["cpu"].item()

    assert together(2, act) == [1.0, 1.0]


def test_a_peer_lost_in_the_sum_loses_the_step_and_raises_nothing_in_the_script():
    groups, grads = Room(2).groups(), whole()
    groups[1].abort("gone")
    model = held("rows", 2, 0, groups[0], grads)
    assert math.isnan(model.clip_norm_of_a_script(1.0))
    assert len(model.lost_operations) == 1
    with pytest.raises(PeerLost):
        model.clip_norm_of_a_run(1.0)


def test_a_model_that_is_whole_asks_nobody():
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.ones(3)
    model = SplitModel([param], {}, SimpleNamespace(rank=0, local=False))
    assert model.clip_norm(1.0).item() == pytest.approx(math.sqrt(3))


def test_averages_follow_parameters_that_are_no_longer_here_and_steps_are_still_undone():
    """A pipeline is cut in its first step: after the snapshot of it."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    average = Average(net, 0.5)
    average.begin({})
    kept = Tensors(average.shadow)
    kept.keep()
    before = [t.clone() for t in average.shadow[2:]]
    average.drop(list(net[0].parameters()))
    with torch.no_grad():
        net[1].weight.add_(1)
    average.update()
    assert not torch.equal(average.shadow[0], before[0])
    kept.put_back()
    assert all(torch.equal(a, b) for a, b in zip(average.shadow, before, strict=True))
    kept.keep()
    assert len(kept.copies) == 2


def test_an_average_that_begins_after_the_snapshot_is_undone_to_its_beginning():
    net = nn.Linear(2, 2)
    average = Average(net, 0.5)
    kept = Tensors(average.shadow)
    average.on_begin = kept.follow
    kept.keep()
    average.update()
    average.begin({})
    begun = [t.clone() for t in average.shadow]
    with torch.no_grad():
        net.weight.add_(1)
    average.update()
    assert not torch.equal(average.shadow[0], begun[0])
    kept.put_back()
    assert all(torch.equal(a, b) for a, b in zip(average.shadow, begun, strict=True))
