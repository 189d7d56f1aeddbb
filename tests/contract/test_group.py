"""One contract suite for every Group: alone, threads, torch over our store."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from echelon.clock import Deadline
from echelon.comm.alone import AloneGroup
from echelon.comm.group import Lost, Met, merge
from echelon.comm.threads import Room
from tests.contract.group_contract import CHECKS

WORKER = Path(__file__).with_name("group_worker.py")


def together(size, act):
    """Runs act(group) on `size` thread ranks; raises what any of them raised."""
    together_of(Room(size).groups(), act)


def together_of(groups, act):
    """The same for any groups whose ranks are threads."""
    errors = []

    def body(group):
        try:
            act(group)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(g,)) for g in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_a_group_of_one(check):
    check(AloneGroup())


@pytest.mark.case("Group.buffer")
@pytest.mark.case("one contract for every Group")
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_threads(check, size):
    together(size, check)


@pytest.mark.case("Group over torch.distributed with our store")
@pytest.mark.case("Group over shared memory")
@pytest.mark.parametrize(
    ("backend", "workers"),
    [
        ("gloo", 1),
        pytest.param("gloo", 3, marks=pytest.mark.slow),
        ("native", 1),
        ("native", 3),
        pytest.param("native", 5, marks=pytest.mark.slow),
    ],
)
def test_real_processes(launch, tmp_path, backend, workers):
    result = launch(WORKER, str(tmp_path), backend, workers=workers)
    assert result.code == 0, result.err
    assert len(list(tmp_path.glob("met-*"))) == workers


@pytest.mark.case("Lost")
@pytest.mark.parametrize("backend", ["gloo", "native"])
def test_a_dead_peer_is_lost_for_the_others_and_named(launch, tmp_path, backend):
    result = launch(WORKER, str(tmp_path), backend, "die", workers=3)
    assert result.code == 137
    assert [(tmp_path / f"lost-{r}").read_text() for r in (0, 1)] == ["(2,)", "(2,)"]


def test_a_rank_that_does_not_come_is_lost_at_the_deadline():
    a, _ = Room(2).groups()
    outcome = a.all_reduce(torch.ones(1)).wait(Deadline.after(0.05))
    assert isinstance(outcome, Lost)
    assert outcome.peers == (1,)


def test_different_operations_name_both_sides():
    a, b = Room(2).groups()
    work = a.all_reduce(torch.ones(3))
    b.broadcast(torch.ones(4))
    outcome = work.wait(Deadline.after(1))
    assert isinstance(outcome, Lost)
    assert "rank 0: all_reduce sum (3,)" in outcome.reason
    assert "rank 1: broadcast from 0 (4,)" in outcome.reason


def test_pieces_of_different_lengths_name_both_sides():
    a, b = Room(2).groups()
    work = a.all_to_all(torch.zeros(3), torch.zeros(3), [1, 2], [1, 2])
    b.all_to_all(torch.zeros(4), torch.zeros(4), [1, 3], [2, 2])
    outcome = work.wait(Deadline.after(1))
    assert isinstance(outcome, Lost)
    assert "rank 0 sends 2 elements to rank 1, which expects 1" in outcome.reason


def test_a_message_of_another_size_names_both_sides():
    a, b = Room(2).groups()
    a.send(torch.zeros(3), 1, 4)
    outcome = b.recv(torch.zeros(5), 0, 4).wait(Deadline.after(1))
    assert isinstance(outcome, Lost)
    assert "rank 0 sent (3,) torch.float32 with tag 4, rank 1 wants to receive (5,)" in outcome.reason


def test_abort_loses_what_is_under_way_and_what_comes():
    for group in (AloneGroup(), Room(2).groups()[0]):
        group.abort("enough")
        assert group.all_reduce(torch.ones(1)).wait(Deadline.after(1)) == Lost(
            group.barrier().wait(Deadline.after(1)).peers, "enough"
        )


def test_outcomes_merge_to_everybody_who_was_lost():
    assert merge([Met(), Met()]) == Met()
    assert merge([Met(), Lost((2,), "a"), Lost((0, 2), "b")]) == Lost((0, 2), "a")
