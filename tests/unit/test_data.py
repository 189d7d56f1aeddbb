"""Order, rewinding and randomness of loaders, in one process that plays every rank."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from echelon.data import order, randomness, tree
from echelon.data.deal import Cut
from echelon.data.loader import MapParts
from echelon.errors import UsageError


class Words(Dataset):
    """Samples that say their id and draw from all three generators."""

    def __init__(self, n=23):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return {"id": i, "drawn": (random.random(), float(np.random.rand()), float(torch.rand(1)))}


def collate(samples):
    return [(s["id"], s["drawn"]) for s in samples]


def loader(num_workers=0, **options):
    options = {"batch_size": 5, "shuffle": True, "generator": torch.Generator().manual_seed(7), **options}
    return DataLoader(Words(), num_workers=num_workers, collate_fn=collate, **options)


def walk(parts, epoch, lose=()):
    """Committed (id, drawn) of a rank; each batch number in `lose` is lost once."""
    seen, lose, uncommitted = [], list(lose), []
    for p in parts.epoch(epoch):
        uncommitted.append(parts.kept(p))
        if p.micro.batch in lose:
            lose.remove(p.micro.batch)
            parts.rewind(uncommitted)
            uncommitted = []
            continue
        if p.count:
            seen += p.data
        uncommitted = []
    return seen


@pytest.mark.case("generators")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_order_is_plain_torchs_and_randomness_goes_with_the_sample(num_workers, size):
    plain = loader()
    parts = [MapParts(loader(num_workers), Cut(r, size), 0) for r in range(size)]
    alone = MapParts(loader(), Cut(0, 1), 0)
    for epoch in range(2):
        expected = [[i for i, _ in batch] for batch in plain]
        one = walk(alone, epoch)
        assert [i for i, _ in one] == [i for batch in expected for i in batch]
        every = [walk(p, epoch) for p in parts]
        assert dict(x for seen in every for x in seen) == dict(one)
        assert sum(map(len, every)) == 23


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("lose", [[0], [2], [4], [4, 4], [0, 1, 2, 3, 4]])
def test_a_lost_step_is_yielded_again_with_the_same_samples(num_workers, lose):
    calm, stormy = MapParts(loader(num_workers), Cut(), 0), MapParts(loader(num_workers), Cut(), 0)
    for epoch in range(2):
        assert walk(stormy, epoch, lose) == walk(calm, epoch)


def test_without_a_generator_the_order_follows_from_seed_and_epoch():
    def orders(seed):
        plain = DataLoader(Words(), batch_size=5, shuffle=True)
        return [[i for b in order.batches(plain, seed, epoch) for i in b] for epoch in range(3)]

    torch.manual_seed(1)
    first = orders(0)
    torch.manual_seed(2)
    assert orders(0) == first
    assert orders(1) != first
    assert first[0] != first[1] != first[2]
    assert all(sorted(o) == list(range(23)) for o in first)


def test_drawing_the_order_and_the_samples_leaves_the_scripts_generators_alone():
    before = randomness.capture()
    walk(MapParts(DataLoader(Words(), batch_size=5, shuffle=True, collate_fn=collate), Cut(), 0), 0)
    after = randomness.capture()
    assert torch.equal(before.torch, after.torch)
    assert before.python == after.python
    assert all(np.array_equal(a, b) for a, b in zip(before.numpy, after.numpy, strict=True))


def test_captured_states_come_back_also_once_the_generators_have_moved():
    for _ in range(3):
        state = randomness.capture()
        first = (random.random(), np.random.randn(), torch.rand(1).item())
        second_gaussian = np.random.randn()
        randomness.restore(state)
        assert (random.random(), np.random.randn(), torch.rand(1).item()) == first
        assert np.random.randn() == second_gaussian


def test_a_distributed_sampler_is_refused_with_what_to_do():
    data = TensorDataset(torch.arange(8))
    cut = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    with pytest.raises(UsageError, match="without DistributedSampler"):
        MapParts(cut, Cut(), 0)


def test_mix_is_stable_and_spreads():
    assert randomness.mix(1, 2, 3) == randomness.mix(1, 2, 3)
    assert len({randomness.mix(0, 0, i) for i in range(10_000)}) == 10_000


def test_trees_keep_their_shape():
    nested = {"a": [torch.zeros(4), (torch.ones(4, 2), "text")], "n": 3}
    assert tree.length(nested) == 4
    cut = tree.cut_tree(nested, 1, 3, 4)
    assert cut["a"][0].shape == (2,)
    assert cut["a"][1][1] == "text"
    assert tree.length({"a": torch.zeros(3), "b": torch.zeros(4)}) is None


def test_what_samples_draw_is_the_same_in_every_release():
    """Seeds of samples come from here: another value is another augmentation, and a resumed run that goes on with other samples."""
    found = [randomness.mix(), randomness.mix(0), randomness.mix(1, 2, 3), randomness.mix(7, "sample", -1)]
    assert found == [5700357409661599242, 7795324965117060851, 6087047714123848686, 1087683201211619870]
