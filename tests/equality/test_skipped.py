"""Updates whose gradients are not finite: skipped under every form as one process would by hand, on all servers or on none; or refused by name."""

from __future__ import annotations

import pytest
import torch

from tests.equality import skipped as loops
from tests.equality.test_equality import BOUND, difference


@pytest.fixture(scope="session")
def skipped(launched_once):
    """skipped(workers, servers) -> what each rank has"""

    def results(workers, servers):
        options = ("--servers", str(servers), "--strategy", "ps") if servers else ()
        return launched_once("skipped.py", workers=workers, options=options, always=bool(servers)).ranks

    return results


CELLS = [
    *((2, 0, name, fields) for name, fields in loops.WITHOUT.items()),
    *((2, 2, name, fields) for name, fields in loops.WITH_SERVERS.items()),
    *((1, 2, name, fields) for name, fields in loops.ALONE.items()),
]


@pytest.mark.timeout(300)
@pytest.mark.case("nonfinite: skipped as by hand")
@pytest.mark.case("nonfinite: never torn")
@pytest.mark.parametrize(
    ("workers", "servers", "name", "fields"), CELLS, ids=lambda x: str(x) if isinstance(x, str) else ""
)
def test_the_weights_are_those_of_one_process_that_skips_the_same_updates(
    skipped, workers, servers, name, fields
):
    expected, steps = loops.by_hand(name, fields)
    assert steps or "scaler" in name
    for rank, results in enumerate(skipped(workers, servers)):
        weights, told = results[name]
        assert difference(weights, expected) <= BOUND
        assert told == (steps if rank == 0 else [])  # told once


@pytest.mark.timeout(300)
@pytest.mark.parametrize("breaks", [False, True])
def test_nothing_that_is_not_finite_enters_the_mean_of_copies(skipped, breaks):
    expected = loops.copies_by_hand(breaks)
    ranks = [results["copies", breaks] for results in skipped(2, 2)]
    assert [difference(weights, expected) <= BOUND for weights, _ in ranks] == [True, True]
    assert [len(told) for _, told in ranks] == [2, 2 + breaks]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", loops.APART)
def test_workers_that_are_not_at_one_place_skip_on_all_servers_and_go_on(skipped, name):
    ranks = [results["apart", name] for results in skipped(2, 2)]
    first, second = (weights for weights, _ in ranks)
    assert all(torch.equal(first[key], second[key]) and torch.isfinite(first[key]).all() for key in first)
    assert sum(len(told) for _, told in ranks) == loops.EPOCHS * len(loops.MARKED)


@pytest.mark.timeout(300)
def test_with_compress_nothing_of_a_skipped_update_stays(skipped):
    expected, steps = loops.by_hand("compressed", {})
    for rank, results in enumerate(skipped(2, 0)):
        weights, told = results["compressed"]
        assert difference(weights, expected) < 0.02
        assert told == (steps if rank == 0 else [])


@pytest.mark.timeout(300)
@pytest.mark.case("nonfinite: refused by name")
@pytest.mark.parametrize(
    ("servers", "name"), [(0, "all-reduce"), (0, "compressed"), *((2, name) for name in loops.REFUSED)]
)
def test_an_update_that_is_refused_names_worker_step_and_parameter_and_moves_nothing(skipped, servers, name):
    ranks = [results["refused", name] for results in skipped(2, servers)]
    for rank, (told, _) in enumerate(ranks):
        assert told["message"].startswith("step 3: the gradient of worker 0 is not finite: `2.bias`"), told
        assert (told["step"], told["consequence"]) == (3, rank != 0)
    (_, first), (_, second) = ranks
    assert all(torch.equal(first[key], second[key]) and torch.isfinite(first[key]).all() for key in first)
    model, loader = loops.parts()
    opt = loops.optimizer_for("", model)
    for batch in list(loader)[:2]:
        opt.zero_grad()
        loops.loss_of(model, *batch).backward()
        opt.step()
    assert difference(first, model.state_dict()) <= (0.02 if name == "compressed" else BOUND)
