"""Columns of a table on several workers: who has what, what is refused, and what passes between them."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from echelon.comm.threads import Room
from echelon.data.columns import Columns, columns_of
from echelon.data.sides import Sides, Told, sides
from echelon.errors import LoopError, UsageError
from echelon.mesh.layout import Placed
from echelon.parallel.columns import First, Mark, Wire, runs_of
from tests.equality.divided import part

OF = ("a", "b", "c", "d")
WHOLE = Told(7, OF, "of", labels=True)


def told(names, labels=False, rows=7, of="of", ids=""):
    return Told(rows, tuple(names), of, labels, ids)


@pytest.mark.case("vertical: who has what")
def test_columns_lie_where_their_names_are_and_labels_with_their_owner():
    assert sides([told("c"), told("ad", labels=True), told("b")], OF) == Sides(((2,), (0, 3), (1,)), 1)
    assert sides([told("abcd"), told("", labels=True)], OF) == Sides(((0, 1, 2, 3), ()), 1)


@pytest.mark.case("vertical: who has what")
def test_where_every_worker_has_everything_there_are_no_sides():
    assert sides([WHOLE, WHOLE], OF) is None
    assert sides([WHOLE], OF) is None


@pytest.mark.case("vertical: what is refused says why")
@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ([told("ab", True), told("cd", rows=6)], "worker 0 has 7 rows and worker 1 has 6"),
        ([told("ab", True), told("cd", of="other")], "name different columns"),
        ([told("ab", True), told("bcd")], "column 'b' is on worker 0 and on worker 1"),
        ([WHOLE, told("abcd")], "column 'a' is on worker 0 and on worker 1"),
        ([told("ab", True), told("d")], "no worker has column 'c'"),
        ([told("a", True)], "no worker has column 'b', 'c', 'd'"),
        ([told("ab"), told("cd")], "no worker has the labels"),
        ([told("ab", True), told("cd", True)], "workers 0, 1 have the labels"),
        ([told("abcd", True), told("")], "worker 1 has no columns and no labels"),
        ([told("ab", True, ids="x"), told("cd")], "one of them gives ids"),
        ([told("ab", True, ids="x"), told("cd", ids="y")], "not with the same ids"),
    ],
)
def test_what_makes_no_table_is_refused_with_names(workers, said):
    with pytest.raises(UsageError, match=said):
        sides(workers, OF)


def test_what_is_told_comes_back_as_it_was():
    one = told(["x", 'with "quotes" and\nlines'], labels=True, ids="0f")
    assert Told.read(one.text()) == one


@pytest.mark.case("vertical: who has what")
def test_columns_come_in_the_tables_order_and_rows_in_the_order_of_ids():
    values = torch.arange(6.0).view(3, 2)
    mine = Columns(values, ["d", "b"], OF, target=[7, 8, 9], ids=["z", "x", "y"])
    assert mine.names == ("b", "d")
    assert mine.values.tolist() == [[3, 2], [5, 4], [1, 0]]
    assert [int(y) for _, y in mine] == [8, 9, 7]
    other = Columns(torch.zeros(3, 1), ["a"], OF, ids=["y", "z", "x"])
    assert other.told().ids == mine.told().ids != ""
    assert other[0][1].shape == (0,)
    assert columns_of(DataLoader(Subset(other, [0, 1]))) is other
    assert columns_of([1]) is None


@pytest.mark.case("vertical: what is refused says why")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Columns(torch.zeros(3), ["a"], OF), "1 names for values of shape"),
        (lambda: Columns(torch.zeros(3, 1), ["e"], OF), "does not name 'e'"),
        (lambda: Columns(torch.zeros(3, 2), ["a", "a"], OF), "a name comes twice"),
        (
            lambda: Columns(torch.zeros(3, 1), ["a"], OF, target=torch.zeros(2)),
            "3 rows of values and 2 labels",
        ),
        (lambda: Columns(torch.zeros(3, 1), ["a"], OF, ids=[1, 2, 2]), "2 different ids"),
    ],
)
def test_columns_that_cannot_be_are_refused(make, said):
    with pytest.raises(UsageError, match=said):
        make()


@pytest.mark.parametrize("columns", [(0, 1, 2), (2, 3), (0, 3), (1,), (0, 2, 3)])
def test_runs_of_columns_hold_their_elements_row_by_row(columns):
    weight = torch.arange(20.0).view(5, 4)
    placed = Placed((5, 4), runs_of(columns, (5, 4)), ())
    assert torch.equal(part(weight, placed), weight[:, list(columns)].reshape(-1))


class Seen:
    """A group that notes who is sent what."""

    def __init__(self, group, sent):
        self.group, self.sent = group, sent

    def __getattr__(self, name):
        return getattr(self.group, name)

    def send(self, x, peer, tag=0):
        self.sent.append((self.rank, peer, x.clone()))
        return self.group.send(x, peer, tag)


def on_threads(size, work):
    groups, sent, found, raised = Room(size).groups(), [], [None] * size, []

    def run(rank):
        try:
            found[rank] = work(Seen(groups[rank], sent))
        except BaseException as error:
            raised.append(error)
            groups[rank].abort(str(error))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found, sent, raised


def lost(outcome):
    raise RuntimeError(outcome.reason)


@pytest.mark.case("vertical: only parts and gradients cross")
@pytest.mark.parametrize("owner", [0, 2])
def test_parts_go_to_the_owner_and_the_gradient_comes_back(owner):
    torch.manual_seed(0)
    whole = nn.Linear(4, 3).double()
    x, columns = torch.randn(5, 4).double(), [(0, 2), (3,), (1,)]
    wanted = whole(x)
    wanted.square().sum().backward()

    def work(group):
        mine = list(columns[group.rank])
        layer = nn.Linear(4, 3).double()
        layer.weight = nn.Parameter(whole.weight.detach()[:, mine].clone())
        layer.bias = whole.bias
        wire = Wire(group, owner, lost)
        first = First(layer, "first", len(mine), wire)
        first.mark, first.given = Mark(1, 5, 9), x[:, mine]
        if wire.owns:
            out = first(first.given)
            out.square().sum().backward()
            assert (out - wanted).abs().max() < 1e-14
        else:
            made = first.part(first.given)
            wire.give(made, first.mark)
            made.backward(wire.hear(made))
        return layer.weight.grad

    found, sent, raised = on_threads(3, work)
    assert raised == []
    for mine, grad in zip(columns, found, strict=True):
        assert (grad - whole.weight.grad[:, list(mine)]).abs().max() < 1e-14
    assert all(owner in (sender, peer) for sender, peer, _ in sent), "nobody talks to anybody but the owner"
    assert sorted(tuple(t.shape) for _, _, t in sent) == [(3,)] * 2 + [(5, 3)] * 4


@pytest.mark.case("vertical: other rows are noticed")
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Mark(4, 5, 9), "worker 1 is at forward 4, and worker 0 at 3"),
        (Mark(3, 2, 9), "worker 1 has 2 rows in a batch, and worker 0 5"),
        (Mark(3, 5, 8), "worker 1 took other rows"),
    ],
)
def test_a_worker_that_is_somewhere_else_is_named(other, said):
    def work(group):
        wire = Wire(group, 0, lambda outcome: None)
        if wire.owns:
            return wire.take(torch.zeros(5, 3), Mark(3, 5, 9))
        return wire.give(torch.zeros(other.rows, 3), other)

    _, _, raised = on_threads(2, work)
    assert said in str(next(e for e in raised if isinstance(e, LoopError)))
