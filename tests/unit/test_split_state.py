"""A run's whole state under splits: weights, buffers, averages and optimizers, saved at one layout and restored at any other."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from echelon.checkpoint.load import open_saved
from echelon.errors import CheckpointError
from echelon.mesh.axes import Mesh
from echelon.mesh.layout import Key, Placed, Runs
from tests.checkpoint_ranks import bits, save
from tests.layouts import along, bounds, grid, here, packed, staged, stretches
from tests.runs import State, as_rank, averages, lay, run_of_one

STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.qkv = nn.Linear(6, 12, bias=False)
        self.norm = nn.BatchNorm1d(12)
        self.out = nn.Linear(12, 9)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.out(self.norm(self.qkv(self.embed(x)))) * self.scale


class Counted(torch.optim.Adam):
    """Keeps something that is no tensor for each parameter."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for n, p in enumerate(group["params"]):
                if p.grad is not None:
                    self.state[p]["told"] = {
                        "steps": self.state[p].get("told", {}).get("steps", 0) + 1,
                        "n": n,
                    }


def trained():
    """Weights, averages and optimizer state of one process after a few steps."""
    torch.manual_seed(0)
    net = Net()
    optimizer = Counted(net.parameters(), lr=0.01, weight_decay=0.1, amsgrad=True)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(torch.randint(0, 9, (16,))), torch.randint(0, 9, (16,))).backward()
        optimizer.step()
    return net, optimizer, {name: torch.randn_like(p) for name, p in net.named_parameters()}


NET, OPTIMIZER, AVERAGE = trained()
NAMES = [name for name, _ in NET.named_parameters()]
VALUES = dict(NET.named_parameters())


def shapes(size, make):
    """Every parameter under one layout; what it cannot split lies whole, and says nothing."""
    found = {}
    for name, value in VALUES.items():
        placed = make(name, tuple(value.shape), size)
        if placed is not None:
            found[name] = placed
    return found


def by_rows(name, shape, size):
    return along(shape, size, 0) if shape else staged(shape, size, 0)


def by_tensor(name, shape, size):
    if name == "qkv.weight":
        return packed(shape, size)
    return along(shape, size, 1) if name in ("out.weight", "embed.weight") else None


def by_stage(name, shape, size):
    return staged(shape, size, NAMES.index(name) * size // len(NAMES))


def by_both(name, shape, size):
    """Two stages of size / 2 ranks, each splitting columns."""
    stage, half = NAMES.index(name) * 2 // len(NAMES), size // 2
    inner = (
        along(shape, half, len(shape) - 1)
        if shape
        else [Placed(shape, (Runs(0, 1),), tuple(range(half)))] * half
    )
    moved = [dataclasses.replace(p, copies=tuple(c + stage * half for c in p.copies)) for p in inner]
    nothing = [Placed(shape, (), (rank,)) for rank in range(half)]
    return nothing + moved if stage else moved + nothing


def by_grid(name, shape, size):
    return grid(shape, 2, size // 2) if len(shape) == 2 else None


LAYOUTS = {
    "whole/1": (1, lambda name, shape, size: None),
    "whole/3": (3, lambda name, shape, size: None),
    "rows/4": (4, by_rows),
    "stretches/5": (5, lambda name, shape, size: stretches(shape, size)),
    "tensor/2": (2, by_tensor),
    "tensor/3": (3, by_tensor),
    "stages/3": (3, by_stage),
    "stages x columns/4": (4, by_both),
    "grid/4": (4, by_grid),
}
BUFFERS_ON = {"stages/3": 1, "stages x columns/4": 2}


class Rank:
    """One rank of a run whose model is split as a form would leave it."""

    def __init__(self, tmp_path, layout, rank, fill, optimizer=Counted, **options):
        size, make = LAYOUTS[layout]
        run = run_of_one(tmp_path / "it", ema=0.5)
        with torch.random.fork_rng():
            self.net = Net()
        self.optimizer = optimizer(
            self.net.parameters(), **({"lr": 0.01, "weight_decay": 0.1, "amsgrad": True} | options)
        )
        run.prepare(self.net, self.optimizer)
        as_rank(run, rank, Mesh((1, size, 1)) if layout in BUFFERS_ON else Mesh((size, 1, 1)))
        self.whole = State(run)
        self.placed = {name: layouts[rank] for name, layouts in shapes(size, make).items()}
        self.params = dict(self.net.named_parameters())
        for name, placed in self.placed.items():
            param, empty = self.params[name], torch.full((), math.nan).expand(placed.shape)
            param.data = self.part(name, param.data) if placed.runs else empty
            lay(run, self.net, name, placed)
        for name, _ in self.net.named_buffers() if layout in BUFFERS_ON else ():
            on = (Runs(0, 1 if "tracked" in name else 12),) if rank == BUFFERS_ON[layout] else ()
            lay(run, self.net, name, Placed(() if "tracked" in name else (12,), on, (BUFFERS_ON[layout],)))
        self.average = {id(p): average for p, average in averages(run, self.net)}
        if fill:
            self.fill()

    def part(self, name, tensor):
        placed = self.placed.get(name)
        whole = placed is None or placed.numel == math.prod(placed.shape)
        return tensor.detach().clone() if whole else here(tensor.detach(), placed)

    def holds(self, name):
        return name not in self.placed or bool(self.placed[name].runs)

    @torch.no_grad()
    def fill(self):
        for name, param in self.params.items():
            if self.holds(name):
                param.copy_(self.part(name, VALUES[name]))
                self.average[id(param)].copy_(self.part(name, AVERAGE[name]))
                kept = OPTIMIZER.state[VALUES[name]]
                self.optimizer.state[param] = {
                    slot: self.part(name, x) if isinstance(x, torch.Tensor) and x.shape == VALUES[name].shape and slot != "step"
                    else x.clone() if isinstance(x, torch.Tensor) else dict(x) for slot, x in kept.items()
                }  # fmt: skip
        for (_, mine), (_, x) in zip(self.net.named_buffers(), NET.named_buffers(), strict=True):
            mine.copy_(x)

    def check(self):
        for name, param in self.params.items():
            if not self.holds(name):
                assert param.isnan().all(), "a placeholder stays one"
                assert not self.optimizer.state.get(param)
                continue
            assert bits(param) == bits(self.part(name, VALUES[name])), name
            assert bits(self.average[id(param)]) == bits(self.part(name, AVERAGE[name])), name
            kept, mine = OPTIMIZER.state[VALUES[name]], self.optimizer.state[param]
            assert list(mine) == list(kept), name
            for slot, x in kept.items():
                if slot == "told":
                    assert mine[slot] == x
                elif slot == "step":
                    assert mine[slot].shape == ()
                    assert mine[slot] == x == STEPS
                else:
                    assert bits(mine[slot]) == bits(self.part(name, x)), (name, slot)
        for (name, mine), (_, x) in zip(self.net.named_buffers(), NET.named_buffers(), strict=True):
            if not self.whole.is_absent(name):
                assert torch.equal(mine, x), name


def saved_as(tmp_path, layout):
    size, _ = LAYOUTS[layout]
    ranks = [Rank(tmp_path, layout, rank, fill=True) for rank in range(size)]
    path = tmp_path / layout.replace("/", "-")
    save(
        path, STEPS, lambda rank: ranks[rank].whole.holdings(), size=size,
        objects=lambda rank: ranks[rank].whole.objects(),
    )[0].wait()  # fmt: skip
    return open_saved(path / f"step-{STEPS:08d}")


@pytest.mark.case("a checkpoint of any form loads under any other")
@pytest.mark.parametrize("one", LAYOUTS)
def test_everything_saved_under_one_layout_is_restored_under_every_other(tmp_path, one):
    saved = saved_as(tmp_path, one)
    for slot in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        assert saved.shape(Key("qkv.weight", f"optimizer0.{slot}")) == (12, 6)
    assert saved.shape(Key("qkv.weight", "optimizer0.step")) == ()
    for layout, (size, _) in LAYOUTS.items():
        for rank in range(size):
            other = Rank(tmp_path, layout, rank, fill=False)
            other.whole.restore(saved, rank)
            other.check()


def test_restoring_again_fills_the_same_memory(tmp_path):
    saved = saved_as(tmp_path, "tensor/2")
    rank = Rank(tmp_path, "rows/4", 1, fill=False)
    rank.whole.restore(saved, 1)
    before = {
        n: [x.data_ptr() for x in rank.optimizer.state[p].values() if isinstance(x, torch.Tensor)]
        for n, p in rank.params.items()
    }
    rank.whole.restore(saved, 1)
    rank.check()
    after = {
        n: [x.data_ptr() for x in rank.optimizer.state[p].values() if isinstance(x, torch.Tensor)]
        for n, p in rank.params.items()
    }
    assert before == after


def test_restoring_a_part_takes_memory_for_that_part_only(tmp_path):
    """No tensor as large as a whole matrix is made."""
    saved = saved_as(tmp_path, "whole/1")
    rank = Rank(tmp_path, "rows/4", 2, fill=False)
    made = []
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and "empty" in str(func):
                made.append(out.numel())
            return out

    with Watch():
        rank.whole.restore(saved, 0)
    assert max(made) <= 12 * 9 / 4, sorted(made)[-3:]


def test_state_that_is_shaped_like_something_else_is_refused_where_a_parameter_is_split(tmp_path):
    rank = Rank(tmp_path, "rows/4", 1, fill=True)
    rank.optimizer.state[rank.params["qkv.weight"]]["row_var"] = torch.zeros(3, 1)
    with pytest.raises(CheckpointError, match="row_var") as caught:
        rank.whole.holdings()
    assert "shaped like" in caught.value.remedy
    staged_rank = Rank(tmp_path, "stages/3", 0, fill=True)
    param = next(p for n, p in staged_rank.params.items() if staged_rank.holds(n))
    staged_rank.optimizer.state[param]["row_var"] = torch.zeros(3, 1)
    assert any(h.key.slot == "optimizer0.row_var" for h in staged_rank.whole.holdings())


def test_bytes_are_written_by_all_that_hold_them(tmp_path):
    layout = "stages x columns/4"
    saved_as(tmp_path, layout)
    folder = tmp_path / layout.replace("/", "-") / f"step-{STEPS:08d}"
    assert len(list(folder.glob("shard-*"))) == 4
    assert bounds(10, 3) == [0, 3, 6, 10]
