"""Where a model is cut: tables of costs and what follows."""

from __future__ import annotations

import itertools
import random

import pytest

from echelon.errors import StrategyError
from echelon.parallel.pipeline import cut
from echelon.parallel.pipeline.cut import Item, Outline, Wish


def chain(*ns: int, sizes: tuple[int, ...] = (), **kwargs) -> Outline:
    """Nodes l0, l1, … each of which takes what the one before made."""
    sizes = sizes or (8,) * len(ns)
    items = tuple(
        Item(f"l{i}", cost, 0, (f"l{i}.w",), (i - 1,) if i else (), (i,)) for i, cost in enumerate(ns)
    )
    weights = {f"l{i}.w": 100 for i in range(len(ns))}
    modules = {"": ""} | {f"l{i}": f"l{i}" for i in range(len(ns))}
    return Outline(items, dict(enumerate(sizes)), weights, (len(ns) - 1,), modules=modules, **kwargs)


@pytest.mark.case("pipeline: the cut")
@pytest.mark.parametrize(
    ("ns", "wish", "begins"),
    [
        ((10, 10, 10, 10), Wish(2), (0, 2)),
        ((10, 10, 10, 10), Wish(4), (0, 1, 2, 3)),
        ((30, 10, 10, 10), Wish(2), (0, 1)),
        ((10, 10, 10, 30), Wish(2), (0, 3)),
        ((10, 20, 30, 40, 50), Wish(3), (0, 3, 4)),
        ((10, 10, 10, 10), Wish(2, speeds=(3, 1)), (0, 3)),
        ((10, 10, 10, 10), Wish(1), (0,)),
    ],
)
def test_the_slowest_stage_is_as_fast_as_can_be(ns, wish, begins):
    assert cut.find(chain(*ns), wish).begins == begins


@pytest.mark.parametrize(
    ("sizes", "begins"),
    [((8, 8, 8, 8, 8, 8), (0, 3)), ((8, 2, 8, 8, 8, 8), (0, 3)), ((8, 8, 8, 2, 8, 8), (0, 3))],
)
def test_bytes_decide_only_among_cuts_that_are_about_as_fast(sizes, begins):
    assert cut.find(chain(10, 10, 10, 10, 10, 10, sizes=sizes), Wish(2)).begins == begins


def test_among_cuts_as_fast_the_one_that_sends_least_is_taken():
    outline = chain(100, 1, 1, 100, sizes=(8, 2, 8, 8))
    assert cut.find(outline, Wish(2)).begins == (0, 2)
    assert cut.find(chain(100, 1, 1, 100, sizes=(1, 2, 8, 8)), Wish(2)).begins == (0, 1)


def test_the_loss_is_part_of_the_last_stage():
    assert cut.find(chain(10, 10, 10, 10, loss_ns=20), Wish(2)).begins == (0, 3)


def test_a_limit_of_memory_moves_the_cut():
    outline = chain(10, 10, 10, 30)
    assert cut.find(outline, Wish(2)).begins == (0, 3)
    assert cut.find(outline, Wish(2, memory=800)).begins == (0, 2)
    with pytest.raises(StrategyError, match="no cut into 2 stages fits"):
        cut.find(outline, Wish(2, memory=700))


def test_what_is_kept_counts_for_each_micro_batch_in_flight():
    items = tuple(Item(f"l{i}", 10, 100, (), (i - 1,) if i else (), (i,)) for i in range(4))
    outline = Outline(items, {})
    assert cut.find(outline, Wish(2)).begins == (0, 2)
    assert cut.find(outline, Wish(2, memory=300, in_flight=(2, 1))).begins == (0, 1)


def test_more_stages_than_places_are_refused_with_how_many_are_possible():
    outline = chain(10, 10, 10, pins=((0, 1),))
    assert cut.possible(outline) == [2]
    with pytest.raises(StrategyError, match=r"cannot be cut into 3 stages: there are places for 2") as error:
        cut.find(outline, Wish(3))
    assert "pipeline=2" in str(error.value)


def test_names_begin_stages():
    outline = chain(1, 1, 1, 1)
    assert cut.by_names(outline, "l1+l3", 3).begins == (0, 1, 3)
    assert cut.by_names(outline, "l2", 2).stages == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("text", "stages", "said"),
    [
        ("l22", 2, "Did you mean l2?"),
        ("l1", 3, "names the first modules of 1 stages"),
        ("l3+l1", 3, "does not begin after"),
        ("l0", 2, "does not begin after"),
        ("l1", 2, "shares memory"),
        ("idle", 2, "computes nothing"),
    ],
)
def test_names_that_cannot_be_are_refused(text, stages, said):
    outline = chain(1, 1, 1, 1, pins=((0, 1),))
    outline = Outline(**{**outline.__dict__, "modules": {**outline.modules, "idle": "idle"}})
    with pytest.raises(StrategyError) as error:
        cut.by_names(outline, text, stages)
    assert said in str(error.value)


def test_a_module_inside_a_named_one_begins_its_stage_and_free_nodes_do_not():
    items = (Item("a"), Item("b", free=True), Item("b.x"), Item("b.y"))
    outline = Outline(items, modules={"a": "a", "b": "b", "same": "b", "b.x": "b.x"})
    assert cut.by_names(outline, "b", 2).begins == (0, 2)
    assert cut.by_names(outline, "same", 2).begins == (0, 2)
    assert cut.by_names(outline, "b", 2).stages == (0, -1, 1, 1)


def test_parameters_of_two_stages_lie_in_both_and_unused_ones_in_the_first():
    items = (Item("tok", names=("w",)), Item("mid", names=("m",)), Item("head", names=("w", "b")))
    outline = Outline(items, sizes={"w": 4, "m": 4, "b": 4, "unused": 4})
    found = cut.assigned(outline, (0, 1, 2), "")
    assert found.owners == {"w": 0, "m": 1, "b": 2, "unused": 0}
    assert found.shared == {"w": (0, 2)}
    assert found.holders("w") == (0, 2)
    assert found.holders("m") == (1,)


def test_another_record_keeps_parameters_where_they_are():
    first = cut.by_names(chain(1, 1, 1), "l1+l2", 3)
    longer = (
        Item("l0", names=("l0.w",)),
        Item(""),
        Item("l1", names=("l1.w",)),
        Item(""),
        Item("l2", names=("l2.w",)),
    )
    assert cut.follow(Outline(longer, sizes=first.owners), first).stages == (0, 0, 1, 1, 2)
    skips = (Item("l0", names=("l0.w",)), Item("l2", names=("l2.w",)))
    assert cut.follow(Outline(skips, sizes=first.owners), first).begins == (0, 1, 1)
    short = (Item("l0", names=("l0.w",)),)
    assert cut.follow(Outline(short, sizes=first.owners), first).begins == (0, 1, 1)


def test_crossing_counts_each_value_that_is_used_later():
    items = (Item("a", gives=(0,)), Item("b", takes=(0,), gives=(1,)), Item("c", takes=(1,), gives=(2,)),
             Item("d", takes=(0, 2), gives=(3,)))  # fmt: skip
    outline = Outline(items, {0: 1, 1: 10, 2: 100, 3: 1000}, outputs=(3, 1))
    assert cut.crossing(outline, [1, 2, 3]) == {1: 1, 2: 11, 3: 111}


def test_the_best_cut_of_random_models_is_as_good_as_trying_all():
    draw = random.Random(0)
    for _ in range(60):
        ns = [draw.randint(1, 50) for _ in range(draw.randint(3, 9))]
        stages = draw.randint(1, min(4, len(ns)))
        speeds = tuple(draw.choice([1, 2, 3]) for _ in range(stages))
        found = cut.find(chain(*ns), Wish(stages, speeds=speeds))

        def slowest(begins, ns=ns, speeds=speeds):
            ends = [*begins[1:], len(ns)]
            return max(sum(ns[a:b]) / speed for a, b, speed in zip(begins, ends, speeds, strict=True))

        best = min(slowest((0, *rest)) for rest in itertools.combinations(range(1, len(ns)), stages - 1))
        assert slowest(found.begins) <= best * (1 + cut.SLACK) + 1e-9


def test_thousands_of_nodes_are_cut_soon():
    draw = random.Random(0)
    outline = chain(
        *(draw.randint(1, 100) for _ in range(3000)), sizes=tuple(draw.randint(1, 100) for _ in range(3000))
    )
    found = cut.find(outline, Wish(8))
    times = [0] * 8
    for item, stage in zip(outline.items, found.stages, strict=True):
        times[stage] += item.ns
    assert max(times) < 1.1 * sum(times) / 8
