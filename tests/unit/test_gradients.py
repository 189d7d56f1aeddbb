"""Buckets, meetings and self-checks, without a launch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from echelon.comm.group import Lost
from echelon.comm.threads import Room
from echelon.parallel.buckets import pack
from echelon.prepare import selfcheck
from tests.contract.test_group import together
from tests.runs import Meeting, run_of_one


def sync_over(model, group=None, **options):
    return Meeting.all_reduced(model, group or Room(1).groups()[0], **options)


def test_packing_keeps_the_order_and_starts_small():
    assert pack([1, 1, 1, 5, 5, 5], first_bytes=2, bucket_bytes=10) == [[0, 1], [2, 3], [4, 5]]
    assert pack([100], first_bytes=2, bucket_bytes=10) == [[0]]
    assert pack([], 1, 1) == []


def test_gradients_are_views_of_buckets_with_the_parameters_strides():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4)).to(
        memory_format=torch.channels_last
    )
    sync = sync_over(model)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    for p in model.parameters():
        assert p.grad.untyped_storage().data_ptr() in sync.memory
        assert p.grad.stride() == p.stride()


@pytest.mark.case("order learned in the first step")
def test_buckets_follow_the_order_of_the_backward_after_the_first_step():
    class Crossed(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.last(torch.tanh(self.first(x)))

    model = Crossed()
    sync = sync_over(model)
    assert [name for names in sync.names for name in names] == ["first.weight", "last.weight"]
    model(torch.randn(2, 4)).sum().backward()
    sync.commit(1)
    sync.settled()
    assert [name for names in sync.names for name in names] == ["last.weight", "first.weight"]
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.case("buckets overlap backward")
def test_buckets_leave_during_backward():
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    sync = sync_over(model, bucket_bytes=1200, first_bucket_bytes=1200)
    left_at = []
    model[0].weight.register_hook(lambda g: left_at.append(sync.num_left))
    model(torch.randn(2, 16)).sum().backward()
    assert len(sync.names) >= 6
    assert left_at[0] >= 4, "all but the first layers' buckets were on their way before backward ended"


def test_a_stand_ins_gradient_is_dropped_even_if_it_is_nan():
    def act(group):
        layer = nn.Linear(2, 2)
        sync = sync_over(layer, group)
        sync.begin(weight=1.0 if group.rank == 0 else 0.0, counts=group.rank == 0)
        x = torch.ones(1, 2) if group.rank == 0 else torch.full((1, 2), float("nan"))
        layer(x).sum().backward()
        assert torch.equal(layer.weight.grad, torch.ones(2, 2))

    together(2, act)


def test_a_loss_that_touches_no_parameter_on_one_rank_meets_at_the_step():
    def act(group):
        layer = nn.Linear(2, 2)
        sync = sync_over(layer, group)
        sync.begin(weight=0.5)
        if group.rank == 0:
            layer(torch.ones(1, 2)).sum().backward()
        sync.finish()  # what optimizer.step does first
        assert torch.equal(layer.weight.grad, torch.full((2, 2), 0.5))

    together(2, act)


def test_a_lost_meeting_is_told_at_commit():
    def act(group):
        layer = nn.Linear(2, 2)
        sync = sync_over(layer, group)
        if group.rank == 1:
            group.abort("gone")
        layer(torch.ones(1, 2)).sum().backward()
        assert isinstance(sync.commit(1), Lost)

    together(2, act)


def test_two_backwards_inside_a_groups_last_micro_step_count_as_they_should():
    torch.manual_seed(0)
    original = nn.Linear(3, 2).double()

    def act(group):
        layer, plain = copy.deepcopy(original), copy.deepcopy(original)
        g = torch.Generator().manual_seed(1)
        x = torch.randn(2, 4, 3, generator=g, dtype=torch.float64)
        sync = sync_over(layer, group)
        mine = slice(0, 3) if group.rank == 0 else slice(3, 4)
        for i in range(2):
            share = (3 if group.rank == 0 else 1) / 8
            sync.begin(weight=share, last=i == 1, sums_to_one=False)
            layer(x[i][mine]).pow(2).mean().backward()
            layer(x[i][mine]).abs().mean().backward()
            if i == 0:
                sync.seal(layer.parameters())
                assert layer.weight.grad is None
            (plain(x[i]).pow(2).mean() * 0.5).backward()
            (plain(x[i]).abs().mean() * 0.5).backward()
        assert torch.allclose(layer.weight.grad, plain.weight.grad, atol=1e-12, rtol=0)

    together(2, act)


@pytest.mark.parametrize(
    ("divisors", "counts", "is_sum", "factor"),
    [
        ([8.0, 8.0], [8.0, 8.0], False, None),
        ([30.0, 20.0], [3.0, 2.0], False, None),
        ([8.0, 4.0], [8.0, 8.0], False, 1.5),
        ([1.0, 1.0], [8.0, 8.0], True, 2.0),
        ([8.0, 0.0], [8.0, 0.0], False, None),
    ],
)
def test_the_verdict_on_a_losss_divisor(divisors, counts, is_sum, factor):
    found = selfcheck.judge(divisors, counts, is_sum)
    assert (found[0] if found else None) == (pytest.approx(factor) if factor else None)


def test_divisors_are_read_off_the_graph():
    logits = torch.randn(6, 4, requires_grad=True)
    y = torch.tensor([0, 1, -100, 2, -100, 3])
    assert selfcheck.divisor_of(F.cross_entropy(logits, y)).value == 4
    assert selfcheck.divisor_of(F.cross_entropy(logits, y, reduction="sum") / torch.tensor(4.0)).value == 4
    assert selfcheck.divisor_of(logits.pow(2).mean()).value == 24
    assert selfcheck.divisor_of(F.mse_loss(logits, torch.zeros(6, 4)) * 3.0).value == 24
    assert selfcheck.divisor_of(logits.pow(2).sum()).is_sum
    assert selfcheck.divisor_of(logits.exp().max()) is None


def test_a_copied_or_pickled_model_belongs_to_nobodys_run():
    model = run_of_one().prepare(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.randn(4, 3)).sum().backward()
        assert type(other[1]) is nn.BatchNorm1d
        assert other[0].weight.grad is not None
        other.zero_grad()
        assert other[0].weight.grad is None
