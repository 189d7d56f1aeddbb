"""Same answer where the model is cut into stages: the weights of one process in plain torch with the same cut, in float64, to 1e-10."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from echelon.strategy import merge, parse
from tests.equality import divided
from tests.equality.test_equality import BOUND

SCRIPT = Path(divided.__file__)


@functools.cache
def plain(kind, optimizer, accumulate, microbatches):
    torch.set_num_threads(1)
    return divided.plain(kind, optimizer, accumulate, microbatches)


@pytest.fixture(scope="session")
def divided_by(launched_once):
    def results(workers, every=False):
        return launched_once("divided.py", *["every"] * every, workers=workers, timeout_s=400).ranks

    return results


def check(ranks, cell):
    text, kind, optimizer = cell
    strategy = merge(parse(text))
    wanted = plain(kind, optimizer, strategy.accumulate, strategy.microbatches if kind == "cnn" else 1)
    held = [results[cell] for results in ranks]
    assert set().union(*held) == set(wanted), "every tensor lies somewhere"
    for name, tensor in wanted.items():
        there = [mine[name] for mine in held if name in mine]
        covered = torch.zeros(tensor.numel())
        for piece, placed in there:
            expected = divided.part(tensor, placed)
            assert piece.numel() == expected.numel(), name
            assert (piece.reshape(-1).double() - expected.double()).abs().max() <= BOUND, name
            for run in placed.runs:
                for k in range(run.count):
                    covered[run.start + k * run.period :][: run.length] = 1
        assert covered.all(), f"all of {name} lies somewhere"


@pytest.mark.case("equality of pipelines")
@pytest.mark.parametrize(
    ("workers", "cell"),
    [
        *((workers, cell) for workers in (2, 3, 4) for cell in divided.cells(workers)),
        *(pytest.param(8, cell, marks=pytest.mark.slow) for cell in divided.cells(8)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_model_in_stages_has_the_weights_of_one_process(divided_by, workers, cell):
    check(divided_by(workers), cell)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_all_schedules_sizes_and_models(divided_by, workers):
    for cell in divided.cells(workers, every=True):
        check(divided_by(workers, every=True), cell)


@pytest.mark.case("lost steps of pipelines")
@pytest.mark.parametrize("workers", divided.LOST)
def test_a_lost_step_of_a_pipeline_changes_no_bit(divided_by, workers):
    for results in divided_by(workers):
        for calm, stormy in zip(results["calm"], results["lost"], strict=True):
            assert calm.keys() == stormy.keys()
            assert [name for name in calm if not torch.equal(calm[name][0], stormy[name][0])] == []


@pytest.mark.case("equality of pipelines with parameter servers")
def test_servers_sum_for_the_workers_of_each_stage(launch, tmp_path):
    options = ("--servers", "2", "--strategy", "ps")
    result = launch(SCRIPT, str(tmp_path), workers=4, options=options)
    assert result.code == 0, result.err[-4000:]
    ranks = [torch.load(tmp_path / f"rank-{r}.pt", weights_only=False) for r in range(4)]
    for cell in divided.SERVED:
        check(ranks, cell)
