"""Same answer: every synchronous form ends with the weights of one process in plain torch, in float64, to 1e-10.

One launch a world size runs all cells; the loop in plain torch runs here.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import pytest
import torch

from tests.equality import features, scripts, zoo  # noqa: F401  scripts adds to FEATURES

HERE = Path(__file__).parent
BOUND = 1e-10
WORLDS = (1, 2, pytest.param(3, marks=pytest.mark.slow), 4)


@functools.cache
def plain(case):
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return zoo.plain_torch(*case)


@functools.cache
def plain_feature(name):
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return features.FEATURES[name](features.Plain())


@pytest.fixture(scope="session")
def launched(launched_once):
    """launched(script, workers) -> each rank's results"""
    return lambda script, workers: launched_once(f"{script}.py", workers=workers).ranks


def difference(mine, theirs):
    assert mine.keys() == theirs.keys()
    return max(float((mine[k].double() - theirs[k].double()).abs().max()) for k in mine)


@pytest.mark.case("equality matrix")
@pytest.mark.parametrize("workers", WORLDS)
@pytest.mark.parametrize("case", zoo.CELLS, ids=lambda c: "-".join(map(str, c)))
def test_the_matrix(launched, workers, case):
    for rank_results in launched("cells", workers):
        weights, _ = rank_results[case]
        assert difference(weights, plain(case)) <= BOUND


@pytest.mark.case("committed ids")
@pytest.mark.parametrize("workers", WORLDS)
def test_committed_ids_of_every_epoch_are_the_epochs_order(launched, workers):
    ranks = launched("cells", workers)
    for case in zoo.CELLS:
        for epoch in range(zoo.EPOCHS):
            ids = sorted(i for results in ranks for i in results[case][1][epoch])
            assert ids == list(range(zoo.SAMPLES)), (case, epoch)


@pytest.mark.case("twice the same bits")
def test_the_same_run_twice_gives_the_same_bits(launched, launch, tmp_path):
    first = launched("cells", 2)
    assert launch(HERE / "cells.py", str(tmp_path), workers=2).code == 0
    for rank, results in enumerate(first):
        again = torch.load(tmp_path / f"rank-{rank}.pt")
        for case, (weights, _) in results.items():
            assert all(torch.equal(v, again[case][0][k]) for k, v in weights.items()), case


STORMS = ["plain", "accumulating", "accumulating by hand", "micro-batches", "amp", "scaler", "batchnorm",
          "ema of the strategy", "ema of the script", "loader processes", "gan", "compressed int8",
          "compressed topk accumulating", "compressed 1bit with a scaler", "compressed powersgd",
          "compressed fp16 gan"]  # fmt: skip


@pytest.mark.case("fp16 with scaling")
@pytest.mark.case("compress: a lost step changes no bit")
@pytest.mark.case("faults.lose")
@pytest.mark.case("replay")
@pytest.mark.parametrize("workers", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", STORMS)
def test_a_lost_step_changes_no_bit(launched, workers, name):
    ranks = launched("storms", workers)
    for results in ranks:
        (calm, calm_ids, calm_lost), (stormy, stormy_ids, stormy_lost) = results[name]
        assert calm_lost == 0
        assert stormy_lost >= 4
        assert calm.keys() == stormy.keys()
        assert [k for k in calm if not torch.equal(calm[k], stormy[k])] == []
        assert calm_ids == stormy_ids
    samples = 20 if name == "accumulating by hand" else zoo.SAMPLES
    for epoch in range(zoo.EPOCHS):
        seen = [i for results in ranks for i in results[name][1][1][epoch]]
        assert len(set(seen)) == len(seen) == samples


FEATURE_WORLDS = (1, pytest.param(2, marks=pytest.mark.slow), 3)


@pytest.mark.parametrize("workers", FEATURE_WORLDS)
@pytest.mark.parametrize("name", features.FEATURES)
def test_features(launched, workers, name):
    for results in launched("features", workers):
        assert difference(results[name], plain_feature(name)) <= BOUND


FACES = ["clip_norm", "loss_sum", "mean_over_a_group", "a_gan_that_accumulates", "bf16", "bf16_autocast_in_the_script", "ema",
         "per_worker_with_warm_up", "every_sees_committed_steps_only", "reduces", "saves", "tracks_and_prepares",
         "weights_equal_at_start_and_streams_differ", "scaled_gradients", "scaled_gradients_in_a_group",
         "loss_sum_with_two_backwards", "a_closure_with_clip_norm", "two_backwards_in_a_group", "gradients_by_hand_in_a_group",
         "two_optimizers_with_replaced_gradients_in_a_group"]  # fmt: skip


@pytest.mark.case("clip_norm")
@pytest.mark.case("run.mean over a group")
@pytest.mark.case("accumulation")
@pytest.mark.case("micro-batches")
@pytest.mark.case("bf16 autocast")
@pytest.mark.case("ema")
@pytest.mark.case("batch=per-worker")
@pytest.mark.case("warm-up")
@pytest.mark.case("run.every")
@pytest.mark.case("run.reduce")
@pytest.mark.case("run.save")
@pytest.mark.case("run.track")
@pytest.mark.case("run.prepare")
@pytest.mark.case("run.epochs")
@pytest.mark.case("run.build")
@pytest.mark.case("run.clip_grad_norm")
@pytest.mark.case("a second init")
@pytest.mark.parametrize("workers", FEATURE_WORLDS)
@pytest.mark.parametrize("name", FACES)
def test_the_public_face(launched, workers, name):
    for said in launched("faces", workers):
        assert said.keys() == set(FACES)
        assert said[name] == "fine"
