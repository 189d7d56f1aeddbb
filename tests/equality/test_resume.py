"""A run that was stopped goes on with the same bits; at another number of workers with the same state and samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.equality import resumed, worlds, zoo
from tests.equality.test_equality import BOUND, difference, plain

NAMES = [name for name in resumed.LOOPS if name not in resumed.LEFT_OUT]


SOME = [name for name in NAMES if name.startswith("storm")] + [
    "persistent_workers", "batch_sampler", "iterable", "several_loaders", "lbfgs", "run_evaluate", "gan",
    "batchnorm_1d_and_scheduler_per_epoch", "sparse_embedding", "run_gather_in_batch_negatives",
    "a_scheduler_made_after_prepare", "add_param_group_with_a_new_module", "a_peek_draws_from_an_explicit_generator",
    "steps_without_a_loader", "scaled_steps_without_a_loader", "two_optimizers_after_one_backward_without_a_loader",
]  # fmt: skip


@pytest.fixture(scope="session")
def stopped(launched_once):
    """stopped(workers, names) -> what each rank found"""
    return lambda workers, names: (
        launched_once("resumed.py", ",".join(names), workers=workers, timeout_s=500).ranks
    )


def assert_same_bits(ranks, name):
    for rank, said in enumerate(ranks):
        for stop_at, steps, problem in said[name]:
            assert not problem, f"rank {rank}, stopped at step {stop_at} of {steps}: {problem}"


@pytest.mark.timeout(600)
@pytest.mark.case("--resume gives the same bits")
@pytest.mark.parametrize("name", NAMES)
def test_stopped_and_resumed_gives_the_same_bits(stopped, name):
    assert_same_bits(stopped(1, NAMES), name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.case("--resume gives the same bits")
@pytest.mark.case("compress: resumed with the same bits")
@pytest.mark.parametrize("name", SOME)
def test_stopped_and_resumed_by_three_gives_the_same_bits(stopped, name):
    assert_same_bits(stopped(3, SOME), name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_stopped_and_resumed_by_several_gives_the_same_bits(stopped, workers, name):
    assert_same_bits(stopped(workers, NAMES), name)


@pytest.fixture(scope="session")
def saved(launched_once):
    """saved(workers, stop_at, source) -> (folder, what each rank said)"""

    def run(workers: int, stop_at: int, source: Path | None):
        said = launched_once("worlds.py", str(stop_at), str(source or "-"), workers=workers)
        return said.out, said.ranks

    return run


STOP = 4


@pytest.mark.case("saved at 4, loaded at any")
@pytest.mark.case("USERS 5")
@pytest.mark.case("USERS 6")
@pytest.mark.parametrize("workers", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 6, 8))])
def test_saved_at_4_and_loaded_at(saved, workers):
    folder, before = saved(4, STOP, None)
    _, after = saved(workers, 0, folder)
    for kind in worlds.LOOPS:
        for said in after:
            assert said[kind]["resumed"] == STOP
            assert difference_of_bits(said[kind]["loaded"], before[0][kind]["saved"]) == []
            assert difference(said[kind]["weights"], answer(kind)) <= BOUND
        assert_every_sample_once(kind, before, after)


@pytest.mark.slow
@pytest.mark.case("saved at 4, loaded at any")
def test_and_back(saved):
    folder, before = saved(4, STOP, None)
    middle, between = saved(2, 5, folder)
    _, after = saved(4, 0, middle)
    for kind in worlds.LOOPS:
        assert difference_of_bits(after[3][kind]["loaded"], between[1][kind]["saved"]) == []
        assert difference(after[0][kind]["weights"], answer(kind)) <= BOUND
        assert_every_sample_once(kind, before, between, after)


def difference_of_bits(mine, theirs):
    return sorted(mine.keys() ^ theirs.keys()) + [
        k for k in mine.keys() & theirs.keys() if not torch.equal(mine[k], theirs[k])
    ]


def answer(kind):
    strategy, optimizer, _ = worlds.LOOPS[kind]
    return plain((kind, optimizer, strategy.accumulate, strategy.microbatches))


def assert_every_sample_once(kind, *lives):
    for epoch in range(zoo.EPOCHS):
        ids = [i for life in lives for rank in life for i in rank[kind]["ids"].get(epoch, [])]
        assert sorted(ids) == list(range(zoo.SAMPLES)), (kind, epoch)
