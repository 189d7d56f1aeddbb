"""BatchNorm in pipelines: how a part becomes micro-batches, and in which order running moments move."""

from __future__ import annotations

import threading
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from echelon.clock import Deadline
from echelon.comm.alone import AloneGroup
from echelon.comm.group import Lost, Met
from echelon.comm.threads import Room
from echelon.data.deal import Cut, micros
from echelon.parallel.pipeline import rows
from echelon.parallel.pipeline.moments import Moments

CPU = torch.device("cpu")


@given(st.integers(1, 23), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_replicas_have_the_slices_of_one_process_and_as_many_of_them(n, size, together, per_worker):
    batches = [list(range(n)), list(range(100, 100 + max(1, n // 2)))]
    (micro, *_) = micros(batches, 0, Cut(0, size, per_worker=per_worker, together=together))
    dealt = []
    for rank in range(size):
        cut = Cut(rank, size, per_worker=per_worker, together=together)
        mine = micro.ids[slice(*micro.dealt(rank, size))]
        sizes = cut.slices(micro)
        assert sum(sizes) == len(mine)
        ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        dealt.append([list(mine[a:b]) for a, b in pairwise(ends)])
    assert len({len(slices) for slices in dealt}) == 1
    if not per_worker:
        alone = [list(m.ids) for m in micros(batches[:1], 0, Cut(microbatches=together))]
        assert [[i for part in slices for i in part] for slices in zip(*dealt, strict=True)] == alone
    assert all(any(parts) for parts in zip(*dealt, strict=True)), "no slice is empty everywhere"


def test_a_slice_of_which_nothing_is_here_is_stood_in_for_by_the_first_sample():
    x, mask = torch.arange(6).view(3, 2), torch.ones(2, 2)
    found = rows.cut(((x,), {"mask": mask}, x[:, 0]), 3, [2, 0, 1], True)
    assert [m.counts for m in found] == [True, False, True]
    assert [m.args[0].tolist() for m in found] == [[[0, 1], [2, 3]], [[0, 1]], [[4, 5]]]
    assert all(m.kwargs["mask"] is mask for m in found), "what has no row for each sample is for all"
    assert [m.weight for m in found] == [2 / 3, 1.0, 1 / 3]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm2d(2, momentum=None), nn.BatchNorm1d(4, affine=False))


def noted(moments, norms, micros):
    for micro in micros:
        g = torch.Generator().manual_seed(micro)
        for norm in (*norms, norms[0]):  # one is called twice
            c = norm.num_features
            moments.note(micro, norm, torch.randn(c, generator=g), torch.rand(c, generator=g))


def test_workers_of_a_stage_end_with_the_moments_of_one_that_saw_all_micro_batches():
    one = model()
    whole = Moments(one, AloneGroup(), CPU)
    noted(whole, list(one), range(7))
    assert isinstance(whole.settle(Deadline.after(5)), Met)

    models = [model() for _ in range(3)]
    shares = [[2, 0, 6], [1, 3, 4, 5], []]
    outcomes = [None] * 3

    def work(rank, group):
        moments = Moments(models[rank], group, CPU)
        noted(moments, list(models[rank]), shares[rank])
        outcomes[rank] = moments.settle(Deadline.after(20))

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(Room(3).groups())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(o, Met) for o in outcomes)
    for other in models:
        for name, buffer in one.state_dict().items():
            assert torch.equal(buffer, other.state_dict()[name]), name
    assert int(one[0].num_batches_tracked) == 14


def test_a_lost_worker_moves_nothing():
    groups, here = Room(2).groups(), model()
    before = {k: v.clone() for k, v in here.state_dict().items()}
    moments = Moments(here, groups[0], CPU)
    noted(moments, list(here), range(2))
    groups[1].abort("gone")
    assert isinstance(moments.settle(Deadline.after(5)), Lost)
    assert all(torch.equal(v, before[k]) for k, v in here.state_dict().items())


def test_nobody_is_asked_in_evaluation():
    here = model().eval()
    moments = Moments(here, Room(2).groups()[0], CPU)
    assert isinstance(moments.settle(Deadline.after(0)), Met)
