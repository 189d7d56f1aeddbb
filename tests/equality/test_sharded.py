"""`sharded` ends with the weights of one process, at every level; loops of every shape; what is lost, saved and refused.

One launch a world size runs all cells; the loop in plain torch runs here.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.equality import sharded, sharded_loops, sharded_saved, split_zoo, zoo

HERE = Path(__file__).parent
BOUND = 1e-10


@functools.cache
def plain(*case):
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return split_zoo.plain_torch(*case)


def difference(mine, theirs):
    assert mine.keys() == theirs.keys()
    return max(float((mine[k].double() - theirs[k].double()).abs().max()) for k in mine)


@pytest.fixture(scope="session")
def launched(launched_once):
    """launched(script, *args, workers=2) -> each rank's results"""

    def run(script, *args, workers=2):
        return launched_once(f"{script}.py", *args, workers=workers, timeout_s=560).ranks

    return run


@pytest.mark.timeout(600)
@pytest.mark.case("sharded: equality matrix")
@pytest.mark.case("sharded: no pickle")
@pytest.mark.parametrize(
    ("workers", "which"),
    [(3, "some"), *(pytest.param(n, "all", marks=pytest.mark.slow) for n in (2, 3, 4))],
)
def test_the_matrix(launched, workers, which):
    chosen = sharded.cells(workers)
    for results in launched("sharded", which, workers=workers):
        assert list(results) == [sharded.key(c) for c in (chosen if which == "all" else sharded.some(chosen))]
        wrong = {k: d for k, w in results.items() if not (d := difference(w, plain(*k[:4]))) <= BOUND}
        assert wrong == {}


@pytest.mark.timeout(600)
@pytest.mark.case("sharded: loops")
@pytest.mark.case("sharded: a lost step changes no bit")
@pytest.mark.case("sharded: what is refused says why")
@pytest.mark.parametrize(
    ("level", "which"),
    [("3", "some"), *(pytest.param(n, "all", marks=pytest.mark.slow) for n in ("1", "2", "3"))],
)
def test_loops_as_scripts_write_them(launched, level, which):
    for said in launched("sharded_loops", level, which):
        assert {name: what for name, what in said.items() if what != "fine"} == {}
        assert len(said) >= len(sharded_loops.SOME)


@pytest.mark.case("sharded: memory")
@pytest.mark.case("sharded: bytes a step, predicted")
@pytest.mark.timeout(240)
def test_at_level_3_on_4_workers_a_rank_holds_a_third_of_what_data_parallel_holds(launched):
    for said in launched("sharded_memory", workers=4):
        whole = said[0]["held"]
        assert said[3]["held"] <= 0.35 * whole
        assert said[2]["held"] <= 0.35 * whole
        assert said[1]["held"] <= 0.70 * whole
        for level in (1, 2, 3):
            assert abs(said[level]["sent"] / said[level]["predicted"] - 1) < 0.15


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.case("sharded: saved under one form, loaded under another")
def test_saved_under_one_form_and_loaded_under_another(launched):
    for said in launched("sharded_saved"):
        for (kind, form, other), found in said.items():
            if other == "saved":
                continue
            assert found["resumed"] == sharded_saved.STOP
            saved = said[kind, form, "saved"]
            assert [k for k, v in found["loaded"].items() if not torch.equal(v, saved[k])] == []
            assert difference(found["weights"], plain(kind, "adamw", 1, 1)) <= BOUND
            first = said[kind, "allreduce", "level 3"]
            assert difference(found["file"], first["file"]) <= BOUND
            assert difference(found["file"], found["weights"]) > BOUND  # the average is saved


@pytest.mark.case("sharded: a killed worker")
@pytest.mark.timeout(120)
def test_a_worker_killed_in_its_forward_ends_the_run_and_is_named(launch):
    done = launch(
        HERE / "sharded_killed.py",
        workers=2,
        options=("--strategy", "sharded,wrap_mib=0.0002"),
        timeout_s=100,
    )
    assert done.code == 137, done.err[-3000:]
    assert "worker 1" in done.err[-1500:]
    assert "came to its end" not in done.err


@pytest.mark.slow
@pytest.mark.case("sharded: level 1 beside a pipeline")
@pytest.mark.timeout(240)
def test_beside_a_pipeline_each_stages_replicas_share_its_state(launch, tmp_path):
    form = "sharded,level=1,data=2,pipeline=2,microbatches=2"
    done = launch(
        HERE / "sharded_piped.py", str(tmp_path), workers=4, options=("--strategy", form), timeout_s=200
    )
    assert done.code == 0, done.err[-3000:]
    model, dataset = split_zoo.make("gpt")
    opt, loader = torch.optim.AdamW(model.parameters(), lr=0.02), zoo.loader_for(dataset)
    for _ in range(zoo.EPOCHS):
        for batch in loader:
            split_zoo.loss_of(model, batch).backward()
            opt.step()
            opt.zero_grad()
    assert difference(load_file(tmp_path / "model.safetensors"), dict(model.state_dict())) <= BOUND
    states = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(4)]
    tied = 1  # the embedding is on both stages
    assert sum(states) == len(list(model.parameters())) + tied
    assert min(states) > 0
