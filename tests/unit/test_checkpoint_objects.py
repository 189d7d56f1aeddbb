"""A tree of plain objects comes back exactly, or is refused by name."""

from __future__ import annotations

import enum
import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.checkpoint.objects import MAX_DEPTH, decode, encode
from echelon.errors import CheckpointError


def again(tree):
    text, tensors = encode(tree)
    return decode(text, tensors.__getitem__)


def same(a, b) -> bool:
    """Equal in type and value, down to the bits of floats."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes()
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, torch.Tensor):
        raw = [x.contiguous().reshape(-1).view(torch.uint8).tolist() if x.numel() else [] for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and raw[0] == raw[1]
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
            return False
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


hashable = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(), st.complex_numbers(allow_nan=False)
)  # fmt: skip
scalars = st.one_of(
    hashable, st.floats(), st.complex_numbers(), st.integers(-(10**30), 10**30), st.binary().map(bytearray),
    st.sampled_from([torch.float32, torch.bfloat16, torch.Size([2, 3]), torch.device("cpu"), Path("a/b"), np.dtype("<i4"), range(3, 9, 2)]),
    st.sampled_from([np.float32(1.5), np.int8(-3), np.bool_(True), np.datetime64("2026-01-01"), np.str_("x"), np.float64("nan")]),
    st.sampled_from([torch.tensor(3.0), torch.zeros(0, 2), torch.arange(6).view(2, 3).t(), torch.tensor([1 + 2j]), torch.tensor([True])]),
    st.sampled_from([np.arange(4.0), np.zeros((0, 3)), np.array("a"), np.asfortranarray(np.ones((2, 3), "f4")), np.array([1], ">i8")]),
)  # fmt: skip


def containers(inside):
    keyed = st.dictionaries(hashable, inside, max_size=4)
    return st.one_of(
        st.lists(inside, max_size=4),
        st.lists(inside, max_size=4).map(tuple),
        st.dictionaries(st.text(), inside, max_size=4),
        keyed,
        keyed.map(OrderedDict),
        keyed.map(lambda d: defaultdict(list, d)),
        st.dictionaries(hashable, st.integers(), max_size=4).map(Counter),
        st.sets(hashable, max_size=4),
        st.frozensets(hashable, max_size=4),
        st.tuples(st.lists(inside, max_size=3), st.sampled_from([None, 3, 7])).map(lambda x: deque(*x)),
    )


@settings(max_examples=300, deadline=None)
@given(st.recursive(scalars, containers, max_leaves=12))
def test_every_plain_tree_comes_back_exactly(tree):
    assert same(again(tree), tree)


def test_random_states_of_all_three_generators_come_back():
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    states["generator"] = np.random.default_rng(3).bit_generator.state
    assert same(again(states), states)


def test_one_and_true_and_one_point_zero_and_the_string_stay_apart():
    tree = {"a": [1, True, 1.0, "1"], "$": "tuple"}
    assert same(again(tree), tree)
    assert same(again({1: "a", "1": "b"}), {1: "a", "1": "b"})


def test_optimizer_state_keeps_its_integer_keys():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert same(again(optimizer.state_dict()), optimizer.state_dict())


def test_what_is_saved_does_not_follow_later_changes():
    x = torch.zeros(3)
    text, tensors = encode({"x": x})
    x += 1
    assert decode(text, tensors.__getitem__)["x"].tolist() == [0, 0, 0]


def test_equal_trees_of_two_ranks_are_equal_bytes():
    assert encode({"s": {"b", "a", 3}})[0] == encode({"s": {3, "a", "b"}})[0]


class Colour(enum.Enum):
    RED = 1


class Mine(dict):
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "builtins.object"),
        (Colour.RED, "Save its .value"),
        (namedtuple("Pair", "a b")(1, 2), "_asdict()"),
        (Mine(a=1), "Save it as dict(…)"),
        (torch.optim.SGD([torch.zeros(1)]), "state_dict() instead"),
        (lambda: 3, "load_state_dict()"),
        (np.array([object()], dtype=object), "numpy.ndarray"),
        (torch.ones(2).to_sparse(), "to_dense()"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_place_and_what_to_do(value, words):
    with pytest.raises(CheckpointError) as caught:
        encode({"scheduler": [0, {"best": value}]})
    assert "objects['scheduler'][1]['best']" in str(caught.value)
    assert words in str(caught.value)


def test_a_tree_that_contains_itself_or_is_endless_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="contains itself"):
        encode(loop)
    deep: list = []
    for _ in range(MAX_DEPTH + 5):
        deep = [deep]
    with pytest.raises(CheckpointError, match="levels deep"):
        encode(deep)
    shared = [1]
    assert again([shared, shared]) == [[1], [1]]


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b'{"$":"os.system","of":["ls"]}', b'{"$":"defaultdict","of":[],"factory":"eval"}', b'{"$":"tensor"}',
     b'{"$":"numpy.dtype","name":"O"}', b'{"$":"numpy.scalar","dtype":"|O","hex":"00"}', b'{"$":["tuple"]}',
     b'{"$":"dtype","name":"nn"}', b'{"$":"dict","of":[[[],1]]}', b"[" * 100_000],
)  # fmt: skip
def test_json_that_is_none_of_ours_is_an_error_and_runs_nothing(text):
    with pytest.raises(CheckpointError, match="cannot be read"):
        decode(text, [].__getitem__)


def test_the_json_is_plain_json():
    text, _ = encode({"step": 3, "nan": math.nan, "inf": -math.inf})
    assert json.loads(text, parse_constant=pytest.fail)["step"] == 3
