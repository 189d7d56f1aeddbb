"""Same answer with parameter servers: the weights of one process in plain torch, whoever sums and whoever applies; also after lost
steps, after a stop, and at another number of workers and servers, or without servers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.equality import features, resumed, scripts, storms, zoo  # noqa: F401  scripts adds to FEATURES
from tests.equality.test_equality import BOUND, difference, plain, plain_feature
from tests.equality.test_resume import answer, assert_every_sample_once, difference_of_bits

SIZES = [(3, 2), *(pytest.param(w, s, marks=pytest.mark.slow) for w, s in ((1, 1), (2, 1), (2, 2), (4, 3)))]
"""Workers and servers."""

NOT_HERE = (
    "the gradient of `0.weight` is not here: with apply=server the parts of all workers meet on the servers"
)
REFUSED = {
    "sparse_embedding": "`rows.weight` has sparse gradients, and servers keep dense ranges",
    "lbfgs": "servers cannot run LBFGS: it calls the model again within a step, and a server has none",
    "complex_parameters": "`w` is complex128: servers know float32 and float64",
    "clip_by_value_and_torch_clipping": NOT_HERE,
    "sharpness_aware_minimization": NOT_HERE,
    "two_optimizers_on_one_model": NOT_HERE,
    "edited_gradients_stepped_on_twice": NOT_HERE,
    "an_optimizer_over_a_part_with_clipping": NOT_HERE,
    "a_step_without_an_optimizer": NOT_HERE,
}
"""Loops that servers cannot step, or that work on gradients between backward and step, with what they are told."""

SOME = [
    *REFUSED, "map_style", "fewer_samples_than_workers", "frozen_unused_tied_called_twice", "a_layer_used_on_some_workers_only",
    "a_layer_thawed_in_mid_training", "closure", "accumulation_by_hand_with_a_rest", "two_losses_two_backwards", "gan", "loose_parameters",
    "batchnorm_1d_and_scheduler_per_epoch", "run_mean_over_unequal_counts", "run_step", "a_gan_that_toggles_requires_grad",
    "add_param_group_with_a_new_module", "a_replaced_head_in_the_old_group", "two_experts_of_which_a_worker_uses_one",
    "parameters_tied_across_two_models", "many_small_parameters", "a_worker_without_a_backward", "values_written_through_data",
    "parameters_read_right_after_each_step", "penalties_on_parametrised_weights", "gradients_that_nobody_zeroes",
    "a_scaler_that_skips_an_epochs_last_step", "one_cycle_scheduler", "two_optimizers_after_one_backward_without_a_loader",
]  # fmt: skip
REST = [name for name in features.FEATURES if name not in SOME]


@pytest.fixture(scope="session")
def served(launched_once):
    """served(workers, servers, names) -> what each rank has"""

    def results(workers, servers, names=None):
        names = names if names is not None else SOME if (workers, servers) == (3, 2) else []
        options = ("--servers", str(servers), "--strategy", "ps")
        return launched_once(
            "served.py", ",".join(names), workers=workers, options=options, always=True, timeout_s=400
        ).ranks

    return results


@pytest.mark.timeout(600)
@pytest.mark.case("equality matrix with parameter servers")
@pytest.mark.parametrize("form", ["sums", "some", "applied"])
@pytest.mark.parametrize(("workers", "servers"), SIZES)
def test_the_matrix_with_servers(served, workers, servers, form):
    for results in served(workers, servers):
        cells = {
            case: found for (kind, case), found in results.items() if kind == form and isinstance(case, tuple)
        }
        assert len(cells) >= 8
        for case, weights in cells.items():
            sparse = form == "applied" and isinstance(weights, str) and "sparse gradients" in weights
            assert sparse == (form == "applied" and case[0] == "table"), (case, weights)
            if not sparse:
                assert not isinstance(weights, str), f"{case}: {weights}"
                assert difference(weights, plain(case)) <= BOUND, case


@pytest.mark.timeout(600)
@pytest.mark.case("every loop with parameter servers, or told why not")
@pytest.mark.parametrize("form", ["sums", "applied"])
@pytest.mark.parametrize(
    "name", [*SOME, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)], ids=str
)
def test_features_with_servers(served, name, form):
    for results in served(3, 2, SOME if name in SOME else REST):
        found = results[form, name]
        if form == "applied" and name in REFUSED:
            assert isinstance(found, str)
            assert found.startswith(REFUSED[name]), found
            assert "apply=worker" in found  # the way out
        else:
            assert not isinstance(found, str), found
            assert difference(found, plain_feature(name)) <= BOUND


STORMS = ["plain", "accumulating by hand", "micro-batches", "scaler", "batchnorm", "ema of the script", "gan"]
STOPS = ["storm plain", "storm scaler", "gan", "run_evaluate", "batchnorm_1d_and_scheduler_per_epoch", "a_scheduler_made_after_prepare",
         "add_param_group_with_a_new_module", "a_replaced_head_in_the_old_group"]  # fmt: skip
MORE_STORMS = ["accumulating", "amp", "ema of the strategy", "loader processes"]
MORE_STOPS = [
    name
    for name, (strategy, _) in resumed.LOOPS.items()
    if name not in resumed.LEFT_OUT and name not in REFUSED and name not in STOPS
    and strategy.compress == "none"
]  # fmt: skip


@pytest.fixture(scope="session")
def disturbed(launched_once):
    """disturbed(storms, stops) -> what each of three ranks found different."""

    def found(names, stops):
        options = ("--servers", "2", "--strategy", "ps")
        return launched_once(
            "served_storms.py", ",".join(names), ",".join(stops), workers=3, options=options, timeout_s=500
        ).ranks

    return found


def slow(names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.timeout(600)
@pytest.mark.case("ps: a lost step changes no bit")
@pytest.mark.parametrize("name", [*STORMS, *slow(MORE_STORMS)])
def test_a_lost_step_changes_no_bit_on_servers(disturbed, name):
    chosen = (STORMS, STOPS) if name in STORMS else (MORE_STORMS, MORE_STOPS)
    assert [found["storm", name] for found in disturbed(*chosen)] == [""] * 3


@pytest.mark.timeout(600)
@pytest.mark.case("ps and --resume")
@pytest.mark.parametrize("name", [*STOPS, *slow(MORE_STOPS)])
def test_stopped_and_resumed_on_servers_gives_the_same_bits(disturbed, name):
    chosen = (STORMS, STOPS) if name in STOPS else (MORE_STORMS, MORE_STOPS)
    assert [found["stop", name] for found in disturbed(*chosen)] == [""] * 3


STOP = 4


@pytest.fixture(scope="session")
def saved(launched_once):
    """saved(workers, servers, stop_at, source) -> (folder, what each rank said). No servers: all-reduce."""

    def run(workers: int, servers: int, stop_at: int, source: Path | None):
        options = ("--servers", str(servers), "--strategy", "ps") if servers else ()
        form = "applied" if servers else ""
        said = launched_once(
            "worlds.py", str(stop_at), str(source or "-"), form,
            workers=workers, options=options, always=bool(servers),
        )  # fmt: skip
        return said.out, said.ranks

    return run


@pytest.mark.timeout(600)
@pytest.mark.case("ps: a checkpoint loads without servers, and the reverse")
@pytest.mark.parametrize(
    "places", [[(3, 2), (2, 0)], *(pytest.param(p, marks=pytest.mark.slow) for p in ([(2, 0), (3, 2)], [(2, 3), (1, 1), (3, 0), (4, 2)]))], ids=str
)  # fmt: skip
def test_a_run_goes_on_with_other_servers_or_none(saved, places):
    source, lives = None, []
    for turn, (workers, servers) in enumerate(places):
        stop_at = (STOP + turn) if turn + 1 < len(places) else 0
        source, life = saved(workers, servers, stop_at, source)
        lives.append(life)
    for kind in ("mlp", "cnn", "transformer"):
        for before, after in itertools.pairwise(lives):
            for said in after:
                assert difference_of_bits(said[kind]["loaded"], before[0][kind]["saved"]) == []
        for said in lives[-1]:
            assert difference(said[kind]["weights"], answer(kind)) <= BOUND
        assert_every_sample_once(kind, *lives)


@pytest.mark.timeout(600)
@pytest.mark.case("ps,update=bounded: no staleness is sync, bit for bit")
@pytest.mark.parametrize(("workers", "servers"), SIZES)
def test_bounded_without_staleness_is_sync_bit_for_bit(served, workers, servers):
    for results in served(workers, servers):
        cells = [
            case
            for (form, case), found in results.items()
            if form == "bounded" and not isinstance(found, str)
        ]
        assert len(cells) >= 12
        for case in cells:
            assert difference_of_bits(results["bounded", case], results["applied", case]) == [], case
