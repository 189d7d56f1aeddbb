"""Coded gradients among thread ranks: the same bits everywhere, error feedback, and its place in the step's transaction."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echelon.comm.group import Lost
from echelon.parallel.buckets import MIB
from tests.contract.test_group import together
from tests.runs import Meeting

CODECS = ["fp16", "bf16", "int8", "1bit", "topk:0.05", "powersgd:2"]


class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.a, self.b = nn.Linear(40, 96, dtype=dtype), nn.Linear(96, 50, dtype=dtype)
        self.never = nn.Linear(30, 60, dtype=dtype)
        generator = torch.Generator().manual_seed(3)  # ranks are threads: they share torch's own
        with torch.no_grad():
            for p in self.parameters():
                p.uniform_(-0.1, 0.1, generator=generator)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def each_of(workers, act):
    """What act(group) gave on each thread rank."""
    found = {}
    together(workers, lambda group: found.update({group.rank: act(group)}))
    return [found[rank] for rank in range(workers)]


def coded_sync(model, group, text, **options):
    return Meeting.all_reduced(model, group, text, **options)


def backward(model, rank, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(4, 40, generator=generator, dtype=dtype)
    model(x).square().mean().backward()


def grads(model):
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def plain_gradient(workers, seed, dtype=torch.float32):
    """What an exact all-reduce would give."""
    model = Net(dtype)
    for rank in range(workers):
        backward(model, rank, seed, dtype)
    return {n: None if p.grad is None else p.grad / workers for n, p in model.named_parameters()}


def relative(a, b):
    """The distance of two sets of gradients, in units of the second one."""
    names = [n for n in b if b[n] is not None]
    gap = torch.stack([(a[n] - b[n]).norm() for n in names]).norm()
    return float(gap / torch.stack([b[n].norm() for n in names]).norm())


def step(sync, model):
    """What an optimizer does around its step."""
    params = list(model.parameters())
    sync.applied(params)
    sync.withdraw(params)
    model.zero_grad()
    sync.commit(1)
    sync.settled()
    sync.keep()


@pytest.mark.case("compress: same bits on every rank")
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_rank_gets_the_same_bits_close_to_the_true_sum(workers, text, dtype):
    def act(group):
        model = Net(dtype)
        sync = coded_sync(model, group, text, bucket_bytes=20_000, first_bucket_bytes=5_000)
        sync.begin(weight=1 / workers)
        found = []
        for seed in range(3):
            backward(model, group.rank, seed, dtype)
            found.append(grads(model))
            step(sync, model)
        assert all(g.dtype is dtype for g in found[0].values() if g is not None)
        return found

    ranks = each_of(workers, act)
    for mine in ranks[1:]:
        for one, other in zip(mine, ranks[0], strict=True):
            for name in one:
                same = one[name] is other[name] is None or torch.equal(one[name], other[name])
                assert same, name
    assert ranks[0][0]["never.weight"] is None
    limit = {"fp16": 1e-3, "bf16": 1e-2, "int8": 0.03, "1bit": 1.1, "topk:0.05": 0.95, "powersgd:2": 0.95}[
        text
    ]
    assert relative(ranks[0][0], plain_gradient(workers, 0, dtype)) <= limit


@pytest.mark.case("compress: error feedback")
@pytest.mark.parametrize("text", CODECS)
def test_error_feedback_drives_the_mean_error_to_zero(text):
    """The sum of what was applied stays within a constant of the sum of the gradients: their means meet."""
    steps, workers = 60, 3

    def act(group):
        model = Net()
        sync = coded_sync(model, group, text, bucket_bytes=20_000, first_bucket_bytes=5_000)
        sync.begin(weight=1 / workers)
        total, errors = {}, []
        for number in range(1, steps + 1):
            backward(model, group.rank, 0)
            for name, grad in grads(model).items():
                if grad is not None:
                    total[name] = total.get(name, 0) + grad
            step(sync, model)
            errors.append(relative({n: t / number for n, t in total.items()}, truth))
        return errors

    truth = plain_gradient(workers, 0)
    errors = each_of(workers, act)[0]
    assert errors[-1] <= max(errors[0] / 4, 1e-6), errors[::10]
    assert errors[-1] <= 0.15


@pytest.mark.case("compress: zero_grad takes back")
@pytest.mark.parametrize("text", CODECS)
def test_zero_grad_takes_back_what_was_sent_and_what_was_not(text):
    def act(group):
        model = Net()
        sync = coded_sync(model, group, text)
        sync.begin(weight=1 / 3)
        for seed in range(2):  # the second step has the buckets' final order
            backward(model, group.rank, seed)
            step(sync, model)
        before = sync.owed
        backward(model, group.rank, 7)
        between = sync.owed
        sync.withdraw(model.parameters())
        model.zero_grad()
        after = sync.owed
        # a step in the same iteration, then a gradient that is taken back
        backward(model, group.rank, 8)
        sync.applied(model.parameters())
        stepped = sync.owed
        model.zero_grad()
        backward(model, group.rank, 9)
        sync.withdraw(model.parameters())
        last = sync.owed
        sync.put_back()
        return before, between, after, stepped, last, sync.owed

    for before, between, after, stepped, last, back in each_of(3, act):
        assert any(not torch.equal(a, b) for a, b in zip(before, between, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert any(not torch.equal(a, b) for a, b in zip(before, stepped, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(stepped, last, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(before, back, strict=True)), "a lost step puts back"


@pytest.mark.case("compress: an infinite gradient does not stay")
@pytest.mark.parametrize("text", CODECS)
def test_a_gradient_that_is_not_finite_is_seen_by_all_and_leaves_no_trace(text):
    def act(group):
        model = Net()
        sync = coded_sync(model, group, text)
        sync.begin(weight=1 / 3)
        generator = torch.Generator().manual_seed(group.rank)
        loss = model(torch.randn(4, 40, generator=generator)).square().mean()
        (loss * float("inf") if group.rank == 1 else loss).backward()
        seen = all(not torch.isfinite(p.grad).all() for p in (model.a.weight, model.b.weight))
        sync.withdraw(model.parameters())  # a GradScaler refused it, the script zeroes
        model.zero_grad()
        backward(model, group.rank, 1)
        return seen, all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)

    assert each_of(3, act) == [(True, True)] * 3


def test_a_scale_that_changes_changes_what_is_owed():
    def act(group):
        model = Net()
        sync = coded_sync(model, group, "topk:0.05")
        sync.begin(weight=0.5)
        backward(model, group.rank, 0)
        step(sync, model)
        before = sync.owed
        sync.rescale(0.5)
        return all(torch.equal(a * 0.5, b) for a, b in zip(before, sync.owed, strict=True))

    assert each_of(2, act) == [True, True]


@pytest.mark.parametrize("text", ["int8", "powersgd:2"])
def test_new_buckets_owe_what_the_old_ones_owed(text):
    def act(group):
        model = Net()
        sync = coded_sync(model, group, text, bucket_bytes=9_000, first_bucket_bytes=5_000)
        sync.begin(weight=1 / 3)
        backward(model, group.rank, 0)
        step(sync, model)
        before = sync.owed_by_name
        model.a.requires_grad_(False)
        sync.cut_anew()
        model.a.requires_grad_(True)
        sync.cut_anew()
        after = sync.owed_by_name
        return all(torch.equal(before[i], after[i]) for i in before) and before.keys() == after.keys()

    assert all(each_of(3, act))


def test_traffic_counts_what_is_sent_and_what_it_would_have_been():
    def act(group):
        model = nn.Linear(512, 512)
        sync = coded_sync(model, group, "int8", bucket_bytes=25 * MIB)
        model(torch.ones(1, 512)).sum().backward()
        return sync.plain_bytes / sync.sent_bytes

    for ratio in each_of(2, act):
        assert 3.8 < ratio < 4.0


@pytest.mark.parametrize("text", CODECS)
def test_a_peer_that_gives_up_is_a_loss_and_nobody_waits_on(text):
    def act(group):
        model = Net()
        sync = coded_sync(model, group, text, bucket_bytes=9_000, first_bucket_bytes=5_000)
        sync.begin(weight=1 / 3)
        if group.rank == 1:
            group.abort("no more")
            return True
        backward(model, group.rank, 0)
        return isinstance(sync.commit(1), Lost)

    assert each_of(3, act) == [True] * 3
