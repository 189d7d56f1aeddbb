"""How layers are dealt to workers, read from a description of a model: tables."""

from __future__ import annotations

import pytest

from echelon.errors import StrategyError
from echelon.mesh.layout import Runs
from echelon.parallel.elementwise import is_known, looks_at_whole
from echelon.parallel.tensor import text
from echelon.parallel.tensor.pieces import Piece, dealt, piece
from echelon.parallel.tensor.plan import plan
from echelon.parallel.tensor.words import Block, Node, Option, Way


def linear(path, rows, columns, weight=0, refused=""):
    return Node(path, "linear", "Linear", rows, columns, weight=weight, refused=refused)


def module(path, **numbers):
    return Node(path, "other", "Block", numbers=tuple(numbers.items()))


def taken(blocks):
    """path of a layer -> its way, of every block's first option, or alone."""
    return {
        w.path: (w.kind, w.units, w.packed)
        for b in blocks
        for w in (b.options[0].ways if b.options else b.alone)
    }


@pytest.mark.parametrize(
    ("units", "size", "shares"),
    [(8, 2, [(0, 4), (4, 8)]), (7, 3, [(0, 3), (3, 5), (5, 7)]), (2, 2, [(0, 1), (1, 2)]), (5, 4, [(0, 2), (2, 3), (3, 4), (4, 5)])],
)  # fmt: skip
def test_units_are_dealt_nearly_evenly_and_in_order(units, size, shares):
    assert [dealt(units, size, rank) for rank in range(size)] == shares


def test_a_piece_says_where_its_elements_lie():
    assert piece((8, 3), 0, 8, 1, 2, 1).runs == (Runs(12, 12, 24, 1),)
    assert piece((4, 6), 1, 6, 1, 2, 1).runs == (Runs(3, 3, 6, 4),)
    packed = piece((12, 4), 0, 2, 3, 2, 0)  # queries, keys and values of two heads
    assert packed == Piece((12, 4), 0, 0, 2, 3)
    assert packed.runs == (Runs(0, 8, 16, 3),)
    assert packed.local_shape == (6, 4)


@pytest.mark.case("tensor: the plan")
@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        pytest.param(
            [module("mlp"), linear("mlp.fc1", 32, 8), linear("mlp.fc2", 8, 32)],
            {"mlp.fc1": ("column", 32, 1), "mlp.fc2": ("row", 32, 1)},
            id="a pair",
        ),
        pytest.param(
            [module("m"), linear("m.gate_proj", 32, 8), linear("m.up_proj", 32, 8), linear("m.down_proj", 8, 32)],
            {"m.gate_proj": ("column", 32, 1), "m.up_proj": ("column", 32, 1), "m.down_proj": ("row", 32, 1)},
            id="a gated pair",
        ),
        pytest.param(
            [module("m"), linear("m.gate_up_proj", 64, 8), linear("m.down_proj", 8, 32)],
            {"m.gate_up_proj": ("column", 32, 2), "m.down_proj": ("row", 32, 1)},
            id="gate and values in one",
        ),
        pytest.param(
            [module("m"), linear("m.fc1", 32, 8), linear("m.fc2", 8, 20)],
            {},
            id="sizes that do not fit each other",
        ),
        pytest.param(
            [Node("s", "sequential"), linear("s.0", 16, 8), Node("s.1", "elementwise"), linear("s.2", 8, 16), linear("s.3", 3, 8)],
            {"s.0": ("column", 16, 1), "s.2": ("row", 16, 1)},
            id="a pair in a Sequential",
        ),
        pytest.param(
            [Node("s", "sequential"), linear("s.0", 16, 8), Node("s.1", "other", "LayerNorm"), linear("s.2", 8, 16)],
            {},
            id="a norm between them",
        ),
        pytest.param(
            [module("a", num_heads=4), *(linear(f"a.{n}_proj", 8, 8) for n in "qkvo")],
            {"a.q_proj": ("column", 4, 1), "a.k_proj": ("column", 4, 1), "a.v_proj": ("column", 4, 1), "a.o_proj": ("row", 4, 1)},
            id="attention by heads",
        ),
        pytest.param(
            [module("a", num_heads=4, num_key_value_heads=2), linear("a.q_proj", 8, 8), linear("a.k_proj", 4, 8),
             linear("a.v_proj", 4, 8), linear("a.o_proj", 8, 8)],
            {"a.q_proj": ("column", 2, 1), "a.k_proj": ("column", 2, 1), "a.v_proj": ("column", 2, 1), "a.o_proj": ("row", 2, 1)},
            id="fewer heads of keys and values",
        ),
        pytest.param(
            [module("a", n_head=4), linear("a.c_attn", 24, 8), linear("a.c_proj", 8, 8)],
            {"a.c_attn": ("column", 4, 3), "a.c_proj": ("row", 4, 1)},
            id="queries, keys and values in one",
        ),
        pytest.param(
            [module("a"), *(linear(f"a.{n}_proj", 8, 8) for n in "qkvo")], {}, id="attention that names no number of heads"
        ),
        pytest.param(
            [Node("x", "attention", numbers=(("num_heads", 2),))], {"x": ("heads", 2, 1)}, id="torch's attention"
        ),
        pytest.param(
            [Node("x", "attention", numbers=(("num_heads", 2),), refused="bias_k")], {}, id="… with what is not split"
        ),
        pytest.param([Node("e", "embedding", rows=5000, columns=64)], {"e": ("vocab", 5000, 1)}, id="a large table"),
        pytest.param([Node("e", "embedding", rows=50, columns=64)], {}, id="a small one"),
        pytest.param([linear("head", 5000, 64)], {"head": ("column", 5000, 1)}, id="a large output layer"),
        pytest.param(
            [Node("e", "embedding", rows=5001, columns=64, weight=1), linear("head", 5001, 64, weight=1)],
            {"e": ("vocab", 5001, 1), "head": ("column", 5001, 1)},
            id="a table and an output layer that share a weight",
        ),
        pytest.param(
            [module("m"), linear("m.fc1", 32, 8, weight=1), linear("m.fc2", 8, 32), linear("other", 32, 8, weight=1)],
            {},
            id="a layer of a pair that shares its weight",
        ),
        pytest.param(
            [Node("s", "sequential"), Node("s.0", "convolution", rows=8, columns=3), Node("s.1", "norm", rows=8),
             Node("s.2", "elementwise"), Node("s.3", "convolution", rows=4, columns=8)],
            {"s.0": ("channels out", 8, 1), "s.1": ("channels", 8, 1), "s.3": ("channels in", 8, 1)},
            id="convolutions with a norm between them",
        ),
    ],
)  # fmt: skip
def test_which_layers_belong_together(nodes, expected):
    blocks, whole = plan(nodes, 2)
    assert taken(blocks) == expected
    assert not set(taken(blocks)) & set(whole)


def test_a_layer_that_stays_whole_has_a_reason():
    _, whole = plan([linear("small", 4, 4), linear("odd", 4, 4, refused="it has hooks")], 2)
    assert whole == {"small": "small (4 × 4): a message would cost more", "odd": "it has hooks"}


@pytest.mark.case("tensor: overrides")
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("*.fc1:whole+*.fc2:whole", {}),
        ("m.fc2:whole", {}),
        ("m.fc1:column+m.fc2:row", {"m.fc1": ("column", 32, 1), "m.fc2": ("row", 32, 1)}),
        ("m.*:row", {"m.fc1": ("row", 8, 1), "m.fc2": ("row", 32, 1)}),
        ("e:vocab", {"m.fc1": ("column", 32, 1), "m.fc2": ("row", 32, 1), "e": ("vocab", 10, 1)}),
    ],
)
def test_what_is_asked_for_by_name_is_done(overrides, expected):
    nodes = [
        module("m"),
        linear("m.fc1", 32, 8),
        linear("m.fc2", 8, 32),
        Node("e", "embedding", rows=10, columns=4),
    ]
    blocks, _ = plan(nodes, 2, overrides)
    assert taken(blocks) == expected


@pytest.mark.case("tensor: refusals")
@pytest.mark.parametrize(
    ("nodes", "size", "options", "says"),
    [
        ([module("blocks.0.attention", num_heads=6), *(linear(f"blocks.0.attention.{n}_proj", 12, 12) for n in "qkvo")], 4, {},
         ["tensor=4 cannot split `blocks.0.attention` (6 heads)", "4 does not divide 6, and padding is off",
          "Use tensor=2, 3 or 6", "--set tensor_padding=true", "blocks.0.attention*:whole"]),
        ([Node("x", "attention", numbers=(("num_heads", 2),))], 4, {"padding": True}, ["4 does not divide 2", "Use tensor=2,"]),
        ([module("a", num_heads=6), *(linear(f"a.{n}_proj", 12 if n in "qo" else 6, 12) for n in "qkvo")], 2, {},
         ["tensor=2 cannot split `a` (3 heads of keys and values)", "--set tensor_padding=true"]),
        ([Node("x", "attention", numbers=(("num_heads", 3),))], 2, {"even": True}, ["under pipeline heads are not dealt unevenly"]),
        ([linear("head", 8, 8)], 2, {"overrides": "heat:column"}, ["no linear module is named 'heat'", "head"]),
        ([linear("head", 8, 8)], 2, {"overrides": "head"}, ["'head' is not PATTERN:column"]),
        ([linear("head", 8, 8)], 2, {"overrides": "head:diagonal"}, ["is not PATTERN:column"]),
        ([linear("head", 3, 8)], 4, {"overrides": "head:column"}, ["it has 3, for 4 workers", "head:whole"]),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused_with_what_to_do(nodes, size, options, says):
    with pytest.raises(StrategyError) as told:
        plan(nodes, size, **options)
    for part in says:
        assert part in str(told.value)


def test_with_padding_some_workers_have_a_head_more():
    blocks, _ = plan([Node("x", "attention", numbers=(("num_heads", 6),))], 4, padding=True)
    assert taken(blocks) == {"x": ("heads", 6, 1)}
    assert text.lines([(blocks[0], blocks[0].options[0])], {}, 4)[1] == "  x: heads, 1 or 2 of 6 a worker"


def test_a_plan_reads_as_lines():
    ways = (Way("m.fc1", "column", 32, inside=True), Way("m.fc2", "row", 32, inside=True))
    block = Block("m", (Option(ways),), "fc1 by columns, fc2 by rows")
    said = text.lines(
        [(block, Option(ways)), (block, None)], {"head": "small (4 × 4): a message would cost more"}, 2
    )
    assert said == [
        "m: fc1 by columns, fc2 by rows",
        "  m.fc1: output features, 16 of 32 a worker",
        "  m.fc2: input features, 16 of 32 a worker",
        "m: whole; fc1 by columns, fc2 by rows did not give the same answer when it was tried",
        "head: whole; small (4 × 4): a message would cost more",
    ]
    assert (
        text.summary([(block, Option(ways))], 1000, 520, 2)
        == "tensor=2: 2 layers split, 52% of the parameters on each worker"
    )


@pytest.mark.parametrize(
    ("name", "module", "known", "whole"),
    [("AdamW", "torch.optim.adamw", True, False), ("LBFGS", "torch.optim.lbfgs", False, True), ("Muon", "torch.optim._muon", False, True),
     ("Muon", "somebody.else", False, False), ("Lion", "somebody.else", False, False)],
)  # fmt: skip
def test_which_optimizers_may_step_on_pieces(name, module, known, whole):
    assert is_known(name, module) == known
    assert bool(looks_at_whole(name, module)) == whole
