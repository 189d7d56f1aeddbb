"""Workers that are not at one place (update=async, update=bounded): with one worker the weights of plain torch, with several every
sample once, and one set of weights for all."""

from __future__ import annotations

import pytest
import torch

from tests.equality import zoo
from tests.equality.test_equality import BOUND, difference, plain, plain_feature


@pytest.fixture(scope="session")
def apart(launched_once):
    """apart(workers, servers) -> what each rank has"""

    def results(workers, servers):
        options = ("--servers", str(servers), "--strategy", "ps")
        return launched_once("apart.py", workers=workers, options=options, always=True).ranks

    return results


@pytest.mark.timeout(300)
@pytest.mark.case("ps,update=async: one worker is plain torch")
def test_async_with_one_worker_is_plain_torch(apart):
    (results,) = apart(1, 2)
    for (form, case), (found, _) in results.items():
        if form == "async":
            expected = plain(case) if isinstance(case, tuple) else plain_feature(case)
            assert difference(found, expected) <= BOUND, case


@pytest.mark.timeout(300)
@pytest.mark.case("ps,update=async: every sample once")
@pytest.mark.parametrize("form", ["async", "bounded"])
def test_every_sample_counts_once_and_all_end_with_the_servers_weights(apart, form):
    ranks = apart(3, 2)
    for case in [case for kind, case in ranks[0] if kind == form and isinstance(case, tuple)]:
        for epoch in range(zoo.EPOCHS):
            ids = sorted(i for results in ranks for i in results[form, case][1].get(epoch, []))
            assert ids == list(range(zoo.SAMPLES)), (case, epoch)
        first, *others = (results[form, case][0] for results in ranks)
        moments = [k for k in first if "running" in k or "num_batches" in k]
        for weights in others:
            apart_by = [k for k in first if not torch.equal(first[k], weights[k]) and k not in moments]
            assert apart_by == [], case
        assert all(torch.isfinite(v).all() for v in first.values())
