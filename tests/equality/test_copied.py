"""Workers that train copies (update=local): one is plain torch, several are a simulation in plain torch."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from tests.equality import features, scripts, zoo  # noqa: F401  scripts adds to FEATURES
from tests.equality.test_equality import BOUND, difference, plain, plain_feature

EPOCHS = 3


@pytest.fixture(scope="session")
def copied(launched_once):
    """copied(workers, servers) -> what each rank has"""

    def results(workers, servers):
        options = ("--servers", str(servers), "--strategy", "ps")
        return launched_once("copied.py", workers=workers, options=options, always=True).ranks

    return results


def simulate(workers, kind, optimizer, local_steps, outer=None, accumulate=1):
    """N copies in plain torch: each takes up to `local_steps` of its batches, then all meet. `outer` are (lr, momentum)."""
    from tests.equality.copied import optimizer_for

    torch.set_num_threads(1)
    model, dataset = zoo.make(kind)
    loader = zoo.loader_for(dataset)
    copies = [copy.deepcopy(model) for _ in range(workers)]
    inner = [optimizer_for(optimizer, mine) for mine in copies]
    trained = list(model.parameters())
    step = torch.optim.SGD(trained, lr=outer[0], momentum=outer[1], nesterov=True) if outer else None
    for _ in range(EPOCHS):
        batches = list(loader)
        each = [batches[r::workers] for r in range(workers)]
        each = [[mine[i : i + accumulate] for i in range(0, len(mine), accumulate)] for mine in each]
        for at in range(0, max(map(len, each)), local_steps):
            counts = [
                take(*who, mine[at : at + local_steps])
                for *who, mine in zip(copies, inner, each, strict=True)
            ]
            meet(model, copies, counts, step)
    return {k: v.clone() for k, v in model.state_dict().items()}


def take(model, optimizer, groups):
    for group in groups:
        total = sum(len(x) for x, _ in group)
        for x, y in group:
            (zoo.mean_ce(model(x), y) * (len(x) / total)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(len(x) for group in groups for x, _ in group)


@torch.no_grad()
def meet(model, copies, counts, step):
    shares = [count / sum(counts) for count in counts]
    moments = [n for n, _ in model.named_buffers() if "running" in n]
    for name in [n for n, _ in model.named_parameters()] + moments:
        mean = sum(share * mine.state_dict()[name] for share, mine in zip(shares, copies, strict=True))
        value = model.state_dict(keep_vars=True)[name]
        if step and name not in moments:
            value.grad = value.detach() - mean
        else:
            value.copy_(mean)
    if step:
        step.step()
    for mine in copies:
        for name, value in model.state_dict().items():
            if "num_batches" not in name:
                mine.state_dict()[name].copy_(value)


def same(found, expected):
    moved = {k: v for k, v in found.items() if "num_batches" not in k}
    return difference(moved, {k: expected[k] for k in moved}) <= BOUND


@pytest.mark.timeout(300)
@pytest.mark.case("ps,update=local: one worker is plain torch")
def test_one_worker_is_plain_torch_in_every_loop(copied):
    results = dict(copied(1, 2)[0])
    for case in zoo.CELLS:
        assert isinstance(results[case], dict), (case, results[case])
        assert difference(results[case], plain(case)) <= BOUND, case
        if case[2:] == (1, 1):  # no group, whose weights round
            assert [k for k, v in plain(case).items() if not torch.equal(v, results[case][k])] == [], case
    wrong = {}
    assert "servers know float32 and float64" in results.pop("complex_parameters")
    for name in features.FEATURES.keys() - {"complex_parameters"}:
        if not isinstance(results[name], dict):
            wrong[name] = results[name]
        elif difference(results[name], plain_feature(name)) > BOUND:
            wrong[name] = "another answer"
    assert wrong == {}


@pytest.mark.timeout(300)
@pytest.mark.case("ps,update=local: a step each and the mean is accumulation")
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_step_each_and_the_mean_is_one_process_that_accumulates(copied, workers, accumulate):
    """Groups of batches at the end of an epoch are incomplete: some worker has none."""
    case = ("mlp", "bare") if accumulate == 1 else ("mlp", "bare", accumulate)
    model, dataset = zoo.make("mlp")
    from tests.equality.copied import bare_sgd

    optimizer, loader = bare_sgd(model), zoo.loader_for(dataset)
    for _ in range(EPOCHS):
        batches = list(loader)
        mine = [batches[r::workers] for r in range(workers)]
        rounds = max(-(-len(m) // accumulate) for m in mine)
        for at in range(rounds):
            take(model, optimizer, [[b for m in mine for b in m[at * accumulate : (at + 1) * accumulate]]])
    for results in copied(workers, 2):
        found, _ = results["mean-1", case]
        assert difference(found, model.state_dict()) <= BOUND


@pytest.mark.timeout(300)
@pytest.mark.case("ps,update=local: copies meet as in a simulation")
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("form", ["mean-1", "mean-2", "diloco-1", "diloco-2"])
def test_copies_meet_as_in_a_simulation_in_plain_torch(copied, workers, form):
    outer = {"diloco-1": (0.7, 0.9), "diloco-2": (0.5, 0.8)}.get(form)
    ranks = copied(workers, 2)
    for case in [case for kind, case in ranks[0] if kind == form and len(case) == 2]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of sparse gradients
            expected = simulate(workers, *case, int(form[-1]), outer)
        for results in ranks:
            assert same(results[form, case][0], expected), case


@pytest.mark.timeout(300)
@pytest.mark.case("ps,update=local: every sample once")
def test_every_sample_counts_once_and_all_end_with_the_same_weights(copied):
    ranks = copied(3, 2)
    for key in ranks[0]:
        for epoch in range(EPOCHS):
            ids = sorted(i for results in ranks for i in results[key][1][epoch])
            assert ids == list(range(zoo.SAMPLES)), (key, epoch)
        first, *others = (results[key][0] for results in ranks)
        for weights in others:
            apart_by = [k for k in first if not torch.equal(first[k], weights[k]) and "num_batches" not in k]
            assert apart_by == [], key
        assert all(torch.isfinite(v).all() for v in first.values())
