"""What is done about gradients that are late (async): compensation, a divided learning rate, and pieces that come twice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from echelon.ps.shard import Shard
from echelon.ps.steps import Counted, Updates

SGD = {"name": "sgd", "numbers": {"lr": 0.5}}


class Part:
    """A request of `worker` (service.Request) with one gradient of 4 elements."""

    def __init__(self, worker: int, grad: list[float], version: int, **head: object) -> None:
        self.peer = SimpleNamespace(rank=worker)
        self.tensors = [torch.tensor(grad)]
        self.head = {"keys": [[0]], "used": [0], "groups": [[SGD, [0]]], "clip_norm": 0.0, "optimizer": 0, "stop": False,
                     "version": version, **head}  # fmt: skip
        self.answered: dict[str, object] = {}

    def answer(self, head, tensors) -> None:
        self.answered = head


@pytest.fixture
def updates() -> Updates:
    memory = torch.zeros(64, dtype=torch.uint8)
    return Updates(Shard([[0, 0, 4, "float32"]], memory, 2))


def give(updates: Updates, part: Part) -> list[float]:
    updates.alone(part, updates.shard.step)
    return updates.shard.values[0].tolist()


def test_a_late_gradient_is_compensated_by_how_far_the_parameters_moved(updates):
    """g + λ·g·g·(now - then), with what the worker really computed on."""
    give(updates, Part(0, [1.0, 1.0, 1.0, 1.0], 0, compensation=2.0))  # now -0.5, and worker 0 knows it
    give(
        updates, Part(1, [2.0, 2.0, 2.0, 2.0], 0, compensation=2.0)
    )  # worker 1 has nothing from here yet: plain; now -1.5
    found = give(updates, Part(0, [1.0, 0.0, -1.0, 3.0], 1, compensation=2.0))
    moved = -1.5 - -0.5
    expected = [-1.5 - 0.5 * (g + 2.0 * g * g * moved) for g in (1.0, 0.0, -1.0, 3.0)]
    assert found == pytest.approx(expected)


def test_a_pull_is_what_a_worker_computes_on(updates):
    give(updates, Part(0, [1.0] * 4, 0, compensation=1.0))
    give(updates, Part(1, [1.0] * 4, 1, compensation=1.0))
    updates.sent(0)
    assert give(updates, Part(0, [1.0] * 4, 2, compensation=1.0)) == pytest.approx([-1.5] * 4)


def test_a_learning_rate_is_divided_by_how_late_the_gradient_is(updates):
    for _ in range(4):
        give(updates, Part(0, [0.0] * 4, updates.shard.updates, divided=True))
    assert give(updates, Part(1, [1.0] * 4, 0, divided=True)) == pytest.approx([-0.5 / 4] * 4)
    assert give(updates, Part(1, [1.0] * 4, 5, divided=True)) == pytest.approx([-0.5 / 4 - 0.5] * 4)
    assert updates.staleness.max == 4


@pytest.mark.case("ps,update=async: a push that reached some servers")
def test_a_piece_that_another_worker_brought_does_not_count_again(updates):
    """Its worker died between two servers, and it was dealt again: this server has it."""
    assert give(updates, Part(0, [1.0] * 4, 0, pieces=[[1, 0, 7]])) == [-0.5] * 4
    late = Part(1, [1.0] * 4, 1, pieces=[[1, 0, 7]])
    assert give(updates, late) == [-0.5] * 4
    assert late.answered["updates"] == 1
    assert give(updates, Part(1, [1.0] * 4, 1, pieces=[[1, 0, 8]])) == [-1.0] * 4


def test_a_worker_may_step_twice_on_one_piece_and_only_old_epochs_are_forgotten():
    counted = Counted()
    assert counted.first(0, [[1, 0, 3]])
    assert counted.first(0, [[1, 0, 3]])
    assert not counted.first(1, [[1, 0, 3]])
    assert counted.first(1, [[1, 0, 3], [1, 0, 4]])  # together with a new one it must
    assert counted.first(1, [])  # without a loader there are no pieces
    for epoch in range(1, 20):
        assert counted.first(0, [[1, epoch, 3]])
    assert not counted.first(1, [[1, 19, 3]])
