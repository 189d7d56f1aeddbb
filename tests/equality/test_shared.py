"""Layers shared by several workers: the weights of one process in plain torch, in float64, to 1e-10. One launch a number of workers."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from safetensors.torch import load_file

from tests.equality import shared_zoo as zoo

BOUND = 1e-10
STAGED = "tensor=2,pipeline=2,microbatches=2"
PARTED = "sharded,level=3,data=2,tensor=2,wrap_mib=0.0005"
MESHES = {2: ("tensor=2",), 4: ("tensor=4", "data=2,tensor=2", STAGED, PARTED)}
EIGHT = "data=2,tensor=2,pipeline=2,microbatches=2"
EIGHT_PARTED = f"sharded,level=3,wrap_mib=0.0005,{EIGHT}"


@functools.cache
def plain(kind, optimizer):
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own way through an encoder in evaluation
        return zoo.plain_torch(kind, optimizer)


@pytest.fixture(scope="module")
def launched(launched_once):
    def said(workers):
        meshes = MESHES.get(workers, (EIGHT, EIGHT_PARTED))
        return launched_once("shared.py", *meshes, workers=workers, timeout_s=400)

    def results(workers):
        return said(workers).ranks

    results.out = lambda workers: said(workers).out
    return results


def joined(ranks, name):
    """The whole tensor from what the ranks hold; every element is somewhere, and the same wherever it is."""
    ranks = [held for held in ranks if held[name][2] != []]  # nothing of it is on ranks of other stages
    shape = ranks[0][name][1]
    whole = torch.full((max(1, torch.Size(shape).numel()),), torch.nan, dtype=torch.float64)
    for held in ranks:
        tensor, told, runs = held[name]
        assert told == shape
        flat = tensor.reshape(-1).double()
        places = torch.arange(flat.numel())
        if runs is not None:
            places = torch.cat([
                (start + period * torch.arange(count)[:, None] + torch.arange(length)).reshape(-1)
                for start, length, period, count in runs
            ])  # fmt: skip
        known = ~whole[places].isnan()
        assert torch.equal(whole[places][known], flat[known]), f"{name} differs between ranks"
        whole[places] = flat
    assert not whole.isnan().any(), f"some of {name} is nowhere"
    return whole.reshape(shape)


def difference(ranks, theirs):
    assert ranks[0].keys() == theirs.keys()
    return max(float((joined(ranks, name) - theirs[name].double()).abs().max()) for name in theirs)


CASES = [
    (workers, mesh) for workers, meshes in MESHES.items() for mesh in meshes if mesh not in (STAGED, PARTED)
]
SAVED = [case for case in CASES if case[1] != "tensor=4"]
CELLS = [(workers, mesh, *cell) for workers, mesh in CASES for cell in zoo.cells(mesh)]


@pytest.mark.case("tensor: equality")
@pytest.mark.parametrize(("workers", "mesh", "kind", "optimizer"), CELLS)
def test_shared_layers_end_with_the_weights_of_one_process(launched, workers, mesh, kind, optimizer):
    ranks = [said[mesh, kind, optimizer] for said in launched(workers)]
    weights, outputs = plain(kind, optimizer)
    assert difference([r["held"] for r in ranks], weights) <= BOUND
    for rank in ranks:  # evaluation of a split model, torch's short way through an encoder included
        assert float((rank["outputs"] - outputs).abs().max()) <= BOUND
        assert rank["loss"] == ranks[0]["loss"]


@pytest.mark.case("tensor: parallel cross-entropy")
@pytest.mark.parametrize(("workers", "mesh"), CASES)
def test_a_language_models_logits_were_never_gathered_in_training(launched, workers, mesh):
    """… whose head shares its weight with the table; its weights are compared above."""
    for said in launched(workers):
        losses, gathers = said[mesh, "gpt", "adamw"]["uses"]["head"]
        assert losses >= zoo.SAMPLES // zoo.BATCH
        assert gathers == 0


@pytest.mark.case("tensor: with a pipeline")
@pytest.mark.parametrize("kind", zoo.STAGED)
@pytest.mark.parametrize(
    ("workers", "mesh"),
    [(4, STAGED), *(pytest.param(8, mesh, marks=pytest.mark.slow) for mesh in (EIGHT, EIGHT_PARTED))],
)
def test_shared_layers_in_stages_end_with_the_weights_of_one_process(launched, workers, mesh, kind):
    ranks = [said[mesh, kind, "adamw"]["held"] for said in launched(workers)]
    assert difference(ranks, plain(kind, "adamw")[0]) <= BOUND


@pytest.mark.case("sharded: levels 2 and 3 over a tensor axis")
@pytest.mark.parametrize("kind", zoo.PARTED)
def test_replicas_that_keep_parts_of_pieces_end_with_the_weights_of_one_process(launched, kind):
    ranks = [said[PARTED, kind, "adamw"]["held"] for said in launched(4)]
    assert difference(ranks, plain(kind, "adamw")[0]) <= BOUND
    for name, (tensor, shape, runs) in ranks[0].items():
        if runs and kind == "gpt" and len(shape) > 1:
            assert tensor.numel() <= 0.6 * torch.Size(shape).numel(), name


@pytest.mark.case("tensor: a lost step changes no bit")
@pytest.mark.parametrize(("workers", "mesh"), CASES)
def test_a_lost_step_changes_no_bit(launched, workers, mesh):
    for said in launched(workers):
        calm, stormy = said[mesh, "two", "adamw"], said[mesh, "lost"]
        assert (calm["lost"], stormy["lost"]) == (0, 3)
        assert all(
            torch.equal(tensor, stormy["held"][name][0]) for name, (tensor, *_) in calm["held"].items()
        )


@pytest.mark.case("tensor: run.step")
@pytest.mark.parametrize(("workers", "mesh"), CASES)
def test_run_step_is_the_same_step(launched, workers, mesh):
    ranks = [said[mesh, "run.step"]["held"] for said in launched(workers)]
    assert difference(ranks, plain("two", "adamw")[0]) <= BOUND


@pytest.mark.case("tensor: saved whole")
@pytest.mark.parametrize(("workers", "mesh"), CASES)
def test_what_is_saved_is_whole(launched, workers, mesh):
    ranks = [said[mesh, "run.step"]["held"] for said in launched(workers)]
    saved = load_file(launched.out(workers) / f"saved-{mesh}.safetensors")
    assert saved.keys() == plain("two", "adamw")[0].keys()
    assert all(torch.equal(joined(ranks, name), tensor) for name, tensor in saved.items())


@pytest.mark.case("tensor: saved whole")
@pytest.mark.parametrize(("workers", "mesh"), SAVED)
def test_a_checkpoint_loads_whatever_is_split(launched, workers, mesh):
    """Convolutions and BatchNorm by channels, with their running statistics."""
    ranks = launched(workers)
    calm = {
        name: joined([r[mesh, "resnet", "adamw"]["held"] for r in ranks], name)
        for name in plain("resnet", "adamw")[0]
    }
    again = [said[mesh, "split from split"]["held"] for said in ranks]
    assert all(torch.equal(joined(again, name), tensor) for name, tensor in calm.items())
    for how in ("whole from split", "split from whole"):
        assert difference([said[mesh, how]["held"] for said in ranks], plain("resnet", "adamw")[0]) <= BOUND


@pytest.mark.case("tensor: memory")
@pytest.mark.parametrize(("workers", "mesh"), CASES)
def test_each_worker_holds_its_share(launched, workers, mesh):
    """Parameters and optimizer state: a T-th of what is split, all of what is not (norms, biases behind sums)."""
    ranks = [said[mesh, "gpt", "adamw"] for said in launched(workers)]
    size = 4 if mesh == "tensor=4" else 2
    shapes = {
        name: (shape, tensor.numel())
        for name, (tensor, shape, _) in ranks[0]["held"].items()
        if name != "head.weight"
    }
    whole = sum(torch.Size(shape).numel() for shape, _ in shapes.values())
    kept = sum(n for shape, n in shapes.values() if torch.Size(shape).numel() == n)
    for rank in ranks:
        assert rank["here"] <= kept + (whole - kept) / size * 1.1
        assert rank["state"] == 2 * rank["here"]
