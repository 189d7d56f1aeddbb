"""Same answer where each worker has some columns of the table and one has the labels: the weights of one process with all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.equality import vertical

SCRIPT = Path(vertical.__file__)
BOUND = 1e-12
WORKERS = 3


@pytest.fixture(scope="session")
def trained(once, launch):
    """The folder, and what each rank said."""

    def make(folder):
        done = launch(SCRIPT, str(folder), workers=WORKERS, options=("--strategy", "tensor=3"))
        assert done.code == 0, done.err[-4000:]

    out = once("vertical", make)
    return out, [json.loads((out / f"said-{rank}.json").read_text()) for rank in range(WORKERS)]


@pytest.mark.case("vertical: equality")
@pytest.mark.parametrize("name", vertical.CELLS)
def test_columns_on_three_workers_give_the_weights_of_one_process(trained, name):
    out, said = trained
    weights, loss = vertical.plain(vertical.CELLS[name])
    saved = load_file(out / f"{name}.safetensors")
    assert saved.keys() == weights.keys()
    assert max((saved[k] - weights[k]).abs().max().item() for k in weights) <= BOUND
    vertical.make(vertical.CELLS[name].model).load_state_dict(saved)
    for rank in said:
        assert rank[name]["loss"] == pytest.approx(loss, abs=BOUND)
        assert rank[name]["last"] == said[0][name]["last"]


@pytest.mark.case("vertical: only parts and gradients cross")
@pytest.mark.parametrize("name", vertical.CELLS)
def test_no_value_of_a_column_and_no_label_is_sent(trained, name):
    _, said = trained
    owner = vertical.CELLS[name].owner
    assert said[0][name]["first weights"] > 0, "what rank 0 did send is seen"
    for rank, heard in enumerate(said):
        assert heard[name]["leaked"] == [0, 0]
        width = 6 if vertical.CELLS[name].model == "frozen" else 8
        if rank != owner:
            assert f"(5, {width})" in heard[name]["shapes"] or f"(3, {width})" in heard[name]["shapes"]


@pytest.mark.case("vertical: who keeps what")
def test_workers_without_labels_keep_their_columns_weights_only(trained):
    _, said = trained
    assert [rank["stretches"]["nan"] for rank in said] == [0, 3, 3]
    assert [rank["labels-only"]["nan"] for rank in said] == [3, 1, 3], "the owner has no column"


@pytest.mark.case("vertical: a lost step changes no bit")
def test_lost_steps_change_no_bit(trained):
    out, _ = trained
    calm, stormy = (load_file(out / f"{name}.safetensors") for name in ("stretches", "lost"))
    assert [k for k in calm if not torch.equal(calm[k], stormy[k])] == []


@pytest.mark.case("vertical: what is refused says why")
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("rows_differ", "UsageError: worker 0 has 22 rows and worker 1 has 21"),
        ("no_axis", "--strategy tensor=3"),
        ("too_late", "Prepare them together"),
        ("plain_loop", "Write loss = run.step(loss_fn, (inputs, target))"),
        ("no_first_layer", "no linear layer of the model gets the model's input as it is"),
        ("lbfgs", "Use an optimizer that steps element by element"),
    ],
)
def test_what_cannot_be_is_refused_on_every_worker(trained, what, message):
    for rank in trained[1]:
        assert message in rank["refused"][what]
