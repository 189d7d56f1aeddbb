"""`sharded` at levels 2 and 3 between the replicas of stages and of pieces: one launch for everything but a killed worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.equality import parted, zoo
from tests.equality import shared_zoo as models
from tests.equality.test_shared import BOUND, difference, joined, plain

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def launched(launched_once):
    said = launched_once("parted.py", workers=4, timeout_s=500)
    return said.out, said.ranks


def of(ranks, *key):
    return [said[key if len(key) > 1 else key[0]] for said in ranks]


def wholes(ranks):
    return {name: joined(ranks, name) for name in ranks[0]}


def without_one(bad):
    """One process in plain torch that leaves out the step `bad`."""
    model, dataset = models.make(parted.KIND)
    opt, clip = models.optimizer_for("adamw", model)
    loader, step = models.loader_for(dataset), 0
    for _ in range(models.EPOCHS):
        for batch in loader:
            step += 1
            x, y = models.inputs(batch)
            zoo.mean_ce(model(*x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            if step != bad:
                opt.step()
            opt.zero_grad()
    return dict(model.state_dict())


@pytest.mark.timeout(560)
@pytest.mark.case("sharded: levels 2 and 3 in a pipeline")
def test_stages_in_parts_lose_steps_evaluate_and_save_as_one_process(launched):
    out, ranks = launched
    weights, _ = plain(parted.KIND, "adamw")
    calm, stormy = of(ranks, "calm"), of(ranks, "stormy")
    assert difference([said["held"] for said in calm], weights) <= BOUND
    for a, b in zip(calm, stormy, strict=True):
        assert (a["lost"], b["lost"]) == (0, 3)
        here = [
            n for n, (_, _, runs) in a["held"].items() if runs != []
        ]  # the other stage's are placeholders
        assert here
        assert [n for n in here if not torch.equal(a["held"][n][0], b["held"][n][0])] == []
    assert len({said["loss"]["loss"] for said in ranks}) == 1
    saved = load_file(out / "model.safetensors")
    mine = wholes([said["held"] for said in calm])
    assert saved.keys() == weights.keys()
    assert [n for n, tensor in saved.items() if not torch.equal(tensor, mine[n])] == []


@pytest.mark.timeout(560)
@pytest.mark.case("sharded: parts of stages and of pieces, saved and loaded")
def test_what_stages_saved_pieces_load_and_the_other_way(launched):
    out, ranks = launched
    weights, _ = plain(parted.KIND, "adamw")
    for source, name in (("piped", "tensor from piped"), ("tensor", "piped from tensor")):
        before, after = wholes(of(ranks, source)), wholes(of(ranks, name, "loaded"))
        assert [n for n in before if not torch.equal(before[n], after[n])] == []
        assert difference(of(ranks, name, "end"), weights) <= BOUND
    averages = [
        load_file(out / f"average-{name}.safetensors") for name in ("tensor from piped", "piped from tensor")
    ]
    assert max(float((averages[0][n] - averages[1][n]).abs().max()) for n in weights) <= BOUND
    assert (
        max(float((averages[0][n] - weights[n]).abs().max()) for n in weights) > BOUND
    )  # an average, not the weights


@pytest.mark.timeout(560)
@pytest.mark.case("sharded: an update that is not finite")
@pytest.mark.parametrize("mesh", [parted.PIPED, parted.TENSOR])
def test_an_update_that_is_not_finite_is_skipped_by_all(launched, mesh):
    _, ranks = launched
    found = of(ranks, "skipped", mesh)
    assert difference([said["held"] for said in found], without_one(parted.BAD)) <= BOUND
    assert found[0]["skipped"] == 1


@pytest.mark.timeout(200)
@pytest.mark.case("sharded: a killed worker")
def test_a_worker_of_a_stage_in_parts_is_killed_and_named(launch):
    options = ("--strategy", f"sharded,level=3,{parted.TINY},pipeline=2,microbatches=2")
    done = launch(HERE / "parted_killed.py", workers=4, options=options, timeout_s=180)
    assert done.code == 137, done.err[-3000:]
    assert "worker 3" in done.err[-1500:]
    assert "came to its end" not in done.err
