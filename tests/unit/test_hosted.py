"""offload: steps on copies in host memory are the optimizer's own, and its state stays there."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from echelon.errors import StrategyError
from echelon.parallel.sharded.hosted import Hosted

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def steps(model, opt, device, around=None):
    g = torch.Generator().manual_seed(1)
    for number in range(4):
        x = torch.randn(3, 5, generator=g).to(device)
        model(x).square().mean().backward()
        if number == 2:
            model[0].bias.grad = None  # it is not stepped, and keeps its state
        opt.step() if around is None else around.step(list(model.parameters()), opt.step)
        opt.zero_grad()


@pytest.mark.case("sharded: offload")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, lr=0.1),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.5),
    ],
    ids=["adamw", "sgd", "rmsprop"],
)
def test_steps_on_the_host_are_the_optimizers_own(make, device):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    mine = copy.deepcopy(plain).to(device)
    wanted, opt = make(plain.parameters()), make(mine.parameters())
    groups = [list(group["params"]) for group in opt.param_groups]
    steps(plain, wanted, "cpu")
    steps(mine, opt, device, Hosted(opt))
    assert [list(group["params"]) for group in opt.param_groups] == groups
    for ours, theirs in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-5, atol=1e-6)
        assert set(opt.state[ours]) == set(wanted.state[theirs])
        assert {v.device.type for v in opt.state[ours].values() if isinstance(v, torch.Tensor)} <= {"cpu"}
    if device == "cpu":  # the very same bits
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), plain.parameters(), strict=True))


@pytest.mark.case("sharded: offload")
def test_an_optimizer_that_may_look_at_whole_parameters_is_refused():
    class Odd(torch.optim.SGD):
        pass

    with pytest.raises(StrategyError, match="offload with Odd"):
        Hosted(Odd(nn.Linear(2, 2).parameters(), lr=0.1))
