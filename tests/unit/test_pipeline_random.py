"""Random forwards, with views, writes into parts of tensors, skips and buffers, cut at every place: always the whole model's gradients."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor, nn

from echelon.parallel.pipeline import cut
from echelon.parallel.pipeline.contract import MicroBatch
from echelon.parallel.pipeline.plan import Plans, outline
from echelon.parallel.pipeline.stage import ModelStage
from echelon.parallel.pipeline.trace import Records
from tests.unit.test_pipeline_stage import one_thread, run, same, whole

__all__ = ["one_thread"]

OPERATIONS = ("layer", "layer", "add", "add", "view", "view", "chunk", "mul_", "add_", "set", "fill", "copy", "buffer", "frozen", "mask", "same")  # fmt: skip
WRITES = ("chunk", "mul_", "add_", "set", "fill")


class Program(nn.Module):
    """Does `steps` one after the other on values of shape (n, 4), each picked from those made so far."""

    def __init__(self, seed: int, length: int = 12) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.steps = [(draw.choice(OPERATIONS), draw.random(), draw.random()) for _ in range(length)]
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        values = [x, self.layers[0](x)]
        for number, (kind, first, second) in enumerate(self.steps):
            a, b = values[int(first * len(values))], values[int(second * len(values))]
            if kind in WRITES and first < 0.8:  # what was made last is seldom needed by backward
                a = values[-1]
            values += self.do(kind, a, b, number)
        return torch.stack(values[1:]).sum(0) + values[-1]

    def do(self, kind: str, a: Tensor, b: Tensor, number: int) -> list[Tensor]:
        if kind == "layer":
            return [self.layers[number % 3](a)]
        if kind == "tanh":
            return [a.tanh()]
        if kind == "add":
            return [a + b]
        if kind == "view":
            return [a.view(2, -1, 4).view(-1, 4)]
        if kind == "chunk":
            left, right = a.chunk(2, dim=1)
            left.mul_(0.5)
            return [torch.cat([right, left], 1)]
        if kind == "mul_":
            a *= 1.5
            return []
        if kind == "add_":
            a.add_(b.detach())
            return []
        if kind == "set":
            a[:, 1] = b[:, 2] * 0.5
            return []
        if kind == "fill":
            a[0].fill_(0.1)
            return []
        if kind == "copy":
            table = torch.zeros_like(a)
            table[:, :2].copy_(a[:, :2])
            return [table]
        if kind == "buffer":
            self.seen.add_(a.detach().sum(0))
            return [b + self.seen]
        if kind == "frozen":
            with torch.no_grad():
                return [self.layers[0](a) + b]
        if kind == "mask":
            mask = torch.ones(4, 4).triu()
            mask[0] = 2
            return [a @ mask.to(a.dtype)]
        return [a.contiguous().to(a.dtype)]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).mean()


def check(seed: int) -> bool:
    """False if plain torch itself refuses the program: it wrote into what backward needs."""
    torch.manual_seed(seed)
    model = Program(seed).double()
    x, y = torch.randn(2, 6, 4, dtype=torch.float64)
    micros = [MicroBatch((x,), {}, y, 1.0)]
    reference, begun = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    try:
        expected = whole(reference, micros, loss_fn)
    except RuntimeError:
        return False
    records = Records(model)
    record = records.of((x,), {})
    shape = outline(record)
    places = cut.possible(shape)
    cuts = [[0], *([0, place] for place in places)]
    draw = random.Random(seed)
    if len(places) > 2:
        cuts += [[0, *sorted(draw.sample(places, 3))] for _ in range(3)]
    for at, begins in enumerate(cuts):
        plans = Plans(model, records, record, cut.assigned(shape, begins, ""))
        model.load_state_dict(begun)
        model.zero_grad()
        stages = [ModelStage(model, plans, index, defer=at % 2 == 1) for index in range(len(begins))]
        losses = run(stages, micros, loss_fn)
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12, msg=f"seed {seed}, cut {begins}")
        same(model, reference)
    return True


@pytest.mark.case("pipeline: random forwards at every cut")
def test_random_forwards_give_the_same_gradients_at_every_cut():
    assert sum(check(seed) for seed in range(30)) >= 8


@pytest.mark.slow
def test_many_random_forwards():
    assert sum(check(seed) for seed in range(1000, 1300)) >= 90
