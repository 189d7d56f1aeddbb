"""Decisions of the form `sharded`: which modules are gathered together, who owns what, where rows lie."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from echelon.comm.threads import Room
from echelon.errors import StrategyError, UsageError
from echelon.mesh.axes import laid
from echelon.mesh.layout import Placed, Runs
from echelon.parallel.sharded import owners
from echelon.parallel.sharded.owned import Owned
from echelon.parallel.sharded.split import Retired, tree
from echelon.parallel.sharded.units import Node, units, walk
from echelon.strategy import merge, parse, require_whole


def block(name, num_bytes=10, **more):
    return Node(
        name,
        children=(Node(f"{name}.a", num_bytes // 2), Node(f"{name}.b", num_bytes - num_bytes // 2)),
        **more,
    )


BLOCKS = tuple(block(f"blocks.{i}") for i in range(4))
TIED = Node(
    "",
    children=(
        Node("embed", 50, ties=(0,)),
        Node("blocks", children=BLOCKS, runs=False, lists=True),
        Node("out", 0, ties=(0,)),
    ),
)


@pytest.mark.case("sharded: which modules are units")
@pytest.mark.parametrize(
    ("root", "limit", "expected"),
    [
        (Node("", 5), 100, [""]),
        (Node("", children=(Node("a", 100), Node("b", 1))), 100, ["a", ""]),
        (Node("", children=(Node("a", 60), Node("b", 60))), 100, [""]),
        (Node("", children=(block("a", 120), block("b", 40))), 100, ["a", ""]),
        (Node("", children=(block("a", 220),)), 100, ["a.a", "a.b", ""]),
        # members of a list that is large enough are units although each is small
        (TIED, 40, ["blocks.0", "blocks.1", "blocks.2", "blocks.3", ""]),
        # … but not where the list is small
        (TIED, 50, [""]),
        # torch's attention reads its children's weights: it is one unit, and so is what is above it
        (Node("", children=(block("attention", 220, opaque=True),)), 100, ["attention", ""]),
        # a list has no forward: it cannot be one
        (Node("", children=(Node("list", 200, runs=False),)), 100, [""]),
        # a module in two places belongs to the one that has both
        (Node("", children=(Node("a", children=(Node("a.x", 200, ties=(1,)), Node("a.y", 0, ties=(1,)))),)), 100, ["a", ""]),
        (Node("", children=(Node("a", 200, ties=(1,)), Node("b", 0, ties=(1,)))), 100, [""]),
    ],
)  # fmt: skip
def test_modules_become_units_by_size(root, limit, expected):
    found = units(root, limit)
    assert list(found) == expected
    assert sum(found.values()) == sum(n.num_bytes for n in walk(root))


def test_a_model_as_it_is_seen():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.out.weight = self.embed.weight
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.attention = nn.MultiheadAttention(4, 2)

    root = tree(Model(), set())
    by_name = {node.name: node for node in root.children}
    assert by_name["embed"].ties == by_name["out"].ties == (0,)
    assert (by_name["embed"].num_bytes, by_name["out"].num_bytes) == (160, 0)
    assert (by_name["layers"].runs, by_name["layers"].lists) == (False, True)
    assert by_name["attention"].opaque
    assert not root.opaque
    assert list(units(root, 80)) == ["layers.0", "layers.1", "layers.2", "attention", ""]


@pytest.mark.case("sharded: who owns what")
@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        ([], 3, []),
        ([7], 3, [0]),
        ([1, 1, 1, 1], 2, [0, 1, 0, 1]),
        ([1, 9, 5, 4], 2, [0, 0, 1, 1]),
        ([0, 0, 3], 2, [1, 1, 0]),
    ],
)
def test_owners_are_balanced_by_bytes(sizes, ranks, expected):
    assert owners.owners(sizes, ranks) == expected


def test_no_owner_has_more_than_its_share_and_one_parameter():
    for ranks in (2, 3, 5):
        sizes = [(i * 37) % 101 for i in range(60)]
        load = [
            sum(s for s, o in zip(sizes, owners.owners(sizes, ranks), strict=True) if o == r)
            for r in range(ranks)
        ]
        assert max(load) <= sum(sizes) / ranks + max(sizes)


@pytest.mark.case("sharded: where rows lie")
@pytest.mark.parametrize("length", range(12))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_rows_are_cut_as_torch_cuts_them(length, ranks):
    whole = torch.arange(length)
    chunks = [c.tolist() for c in whole.chunk(ranks)] if length else []
    mine = [list(range(*owners.rows(length, ranks, rank))) for rank in range(ranks)]
    assert [m for m in mine if m] == chunks
    assert [i for m in mine for i in m] == whole.tolist()


def test_every_element_is_somewhere_and_copies_know_each_other():
    sets = owners.sets([0, 1, 2, 3], 2)
    assert sets == [[0, 1], [2, 3]]
    mesh = laid(4, 0, (1,), 1)
    at = [owners.position(mesh, rank, 2) for rank in range(4)]
    assert at == [0, 1, 0, 1]
    whole = Placed((5, 3), (Runs(0, 15),), (0, 1, 2, 3))
    found = [owners.narrowed(whole, 9 * p, 9 + 6 * p, {r for r in range(4) if at[r] == p}) for p in at]
    assert found[0].runs == found[2].runs == (Runs(0, 9),)
    assert found[1].runs == found[3].runs == (Runs(9, 6),)
    assert [placed.copies for placed in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert owners.narrowed(whole, 4, 4, {1}).runs == ()
    assert owners.placed_state((2, 2), 1, 1).runs == (Runs(0, 4),)
    assert owners.placed_state((2, 2), 1, 0).runs == ()


def test_a_part_of_a_piece_is_runs_of_the_whole():
    """Columns 2 and 3 of a matrix of 4 columns, of which this rank keeps the first rows and a half."""
    piece = Placed((4, 4), (Runs(2, 2, 4, 4),), (1, 3), counts=False)
    assert owners.narrowed(piece, 0, 5, {3}) == Placed(
        (4, 4), (Runs(2, 2, 4, 2), Runs(10, 1)), (3,), counts=False
    )


@pytest.mark.case("sharded: level 1")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta], ids=lambda o: o.__name__
)
def test_owners_step_and_everybody_has_the_values(ranks, make):
    def steps(model, step):
        opt = make(model.parameters(), lr=0.1)
        for seed in range(3):
            for i, p in enumerate(model.parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * seed + i))
            model[2].bias.grad = None  # nobody used it
            step(opt)
        return opt

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    plain = net()
    steps(plain, lambda opt: opt.step())

    def rank(group, model):
        params = list(model.parameters())
        owner = owners.owners([p.nbytes for p in params], group.size)
        owned = Owned(group, dict(zip(map(id, params), owner, strict=True)))

        def step(opt):
            before = [p.grad for p in params]
            owned.step(params, opt.step)
            assert all(a is b.grad for a, b in zip(before, params, strict=True))  # as the script left them

        opt = steps(model, step)
        owned.drop_state(opt)
        return [p.detach() for p in params], sum(map(owned.mine, opt.state)) == len(opt.state)

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(rank, Room(ranks).groups(), [net() for _ in range(ranks)]))
    for values, only_mine in found:
        assert only_mine
        assert all(torch.equal(a, b.detach()) for a, b in zip(values, plain.parameters(), strict=True))


def test_a_parameter_from_before_prepare_says_so():
    param = nn.Parameter(torch.ones(2))
    param.__class__ = Retired
    param.grad = None
    with pytest.raises(UsageError, match="before prepare"):
        _ = param.grad
    opt = torch.optim.SGD([param], 0.1)
    opt.zero_grad = lambda: None
    with pytest.raises(UsageError, match="give prepare\\(\\) every optimizer"):
        opt.step()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sharded,level=2,pipeline=3+1", "level=1, or give every stage as many workers: data=3,pipeline=2"),
        ("sharded,level=4", "must be 1, 2 or 3"),
        ("sharded,compress=int8", "gradients are sent as they are"),
    ],
)
def test_what_does_not_go_together_says_what_does(text, words):
    with pytest.raises(StrategyError, match=words):
        require_whole(merge(parse(text)))
