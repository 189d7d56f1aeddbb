"""Optimizers on a server against torch.optim, and how they travel: as names and numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor

from echelon.errors import UsageError
from echelon.native import reference_update as reference
from echelon.ps.optimizers import Range, recipe_of
from echelon.ps.recipes import REGISTERED, Recipe

pytestmark = pytest.mark.needs("fused")

STEPS = 60

EXACT: dict[str, tuple[type[torch.optim.Optimizer], list[dict[str, object]]]] = {
    "sgd": (
        torch.optim.SGD,
        [{"lr": 0.1}, {"lr": 0.02, "weight_decay": 0.01}, {"lr": 0.05, "maximize": True}],
    ),
    "sgd with momentum": (
        torch.optim.SGD,
        [
            {"lr": 0.1, "momentum": 0.9},
            {"lr": 0.02, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.01},
            {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        ],
    ),
}
"""Torch's own bits."""

ROOTED: dict[str, tuple[type[torch.optim.Optimizer], list[dict[str, object]]]] = {
    "adagrad": (
        torch.optim.Adagrad,
        [{"lr": 0.1}, {"lr": 0.05, "lr_decay": 0.01, "weight_decay": 0.1}, {"lr": 0.2, "eps": 1e-4, "maximize": True}],
    ),
    "rmsprop": (
        torch.optim.RMSprop,
        [
            {"lr": 0.01}, {"lr": 0.02, "alpha": 0.4, "momentum": 0.9, "weight_decay": 0.01},
            {"lr": 0.01, "centered": True}, {"lr": 0.01, "centered": True, "momentum": 0.5, "alpha": 0.3},
        ],
    ),
    "adam": (
        torch.optim.Adam,
        [
            {"lr": 0.01}, {"lr": 0.02, "betas": (0.8, 0.99), "weight_decay": 0.01},
            {"lr": 0.01, "amsgrad": True, "eps": 1e-5}, {"lr": 0.01, "betas": (0.3, 0.9), "maximize": True},
        ],
    ),
    "adamw": (torch.optim.AdamW, [{"lr": 0.01}, {"lr": 0.02, "weight_decay": 0.3, "amsgrad": True}]),
}  # fmt: skip
"""Torch's bits but for its square root, which is not the correctly rounded one."""


def grads(n: int, dtype: torch.dtype, steps: int = STEPS) -> list[Tensor]:
    g = torch.Generator().manual_seed(n)
    return [torch.randn(n, generator=g, dtype=dtype) for _ in range(steps)]


def both(
    kind: type[torch.optim.Optimizer], groups: list[dict[str, object]], dtype: torch.dtype, cuts: int = 3
) -> tuple[torch.optim.Optimizer, list[tuple[Tensor, Tensor, list[Range]]]]:
    """torch.optim and ranges, stepped side by side with a schedule of learning rates: (torch's parameter, ours, its ranges)."""
    starts = [
        torch.randn(501 + 10 * i, dtype=dtype, generator=torch.Generator().manual_seed(i))
        for i in range(len(groups))
    ]
    theirs = [torch.nn.Parameter(x.clone()) for x in starts]
    optimizer = kind([{"params": [p], **g} for p, g in zip(theirs, groups, strict=True)], foreach=False)  # type: ignore[call-arg]
    mine = [x.clone() for x in starts]
    ranges = [
        [Range(recipe, part) for part in x.tensor_split(cuts)]
        for x, recipe in zip(mine, recipe_of(optimizer), strict=True)
    ]
    fed = [grads(x.numel(), dtype) for x in starts]
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] *= 0.99
        recipes = recipe_of(optimizer)
        for p, g in zip(theirs, fed, strict=True):
            p.grad = g[step] * 0.7
        optimizer.step()
        for own, g, recipe in zip(ranges, fed, recipes, strict=True):
            for one, part in zip(own, g[step].tensor_split(cuts), strict=True):
                one.apply(part, scale=0.7, numbers={"lr": recipe.numbers["lr"]} if step % 2 else recipe)
    return optimizer, list(zip(theirs, mine, ranges, strict=True))


def same(optimizer: torch.optim.Optimizer, pairs: list[tuple[Tensor, Tensor, list[Range]]]) -> None:
    for p, x, ranges in pairs:
        assert torch.equal(p.detach(), x)
        theirs, mine = optimizer.state[p], [r.state() for r in ranges]
        assert {k for k, v in theirs.items() if v is not None} == set(mine[0])
        for name in mine[0]:
            whole = mine[0][name] if name == "step" else torch.cat([s[name] for s in mine])
            assert torch.equal(theirs[name], whole), name


@pytest.mark.case("ps: optimizers equal torch's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", list(EXACT))
def test_sgd_gives_torchs_own_bits(name, dtype):
    same(*both(*EXACT[name], dtype))


@pytest.mark.case("ps: optimizers equal torch's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", list(ROOTED))
def test_the_others_give_torchs_bits_once_its_square_root_is_right(name, dtype, monkeypatch):
    """torch takes MKL's square root, one unit in the last place off for some elements; everything else is the same."""
    monkeypatch.setattr(torch.Tensor, "sqrt", reference.root)
    monkeypatch.setattr(torch.Tensor, "sqrt_", lambda x: x.copy_(reference.root(x)))
    same(*both(*ROOTED[name], dtype))


@pytest.mark.parametrize("name", list(ROOTED))
def test_the_others_are_as_close_to_torch_as_its_square_root_allows(name):
    """float64, 60 steps: each step may differ by 2^-52 of what it moves."""
    _, pairs = both(*ROOTED[name], torch.float64)
    for p, x, _ in pairs:
        assert ((p.detach() - x).abs() <= 1e-15 * x.abs().clamp(min=1.0)).all()


def test_torch_square_root_is_at_most_one_unit_off():
    """What the test above stands on; where torch rounds correctly (another build), bits are equal throughout."""
    x = torch.rand(100_000, dtype=torch.float64) + 1e-3
    right = np.sqrt(x.numpy())
    assert (np.abs(x.sqrt().numpy() - right) <= np.spacing(right)).all()


@pytest.mark.parametrize("name", [*EXACT, *ROOTED])
def test_taking_turns_with_a_second_version_changes_no_bit_and_can_be_undone(name):
    kind, groups = {**EXACT, **ROOTED}[name]
    recipe = recipe_of(kind([{"params": [torch.zeros(301)], **groups[-1]}]))[0]  # type: ignore[call-arg]
    plain = Range(recipe, torch.linspace(-1, 1, 301))
    now = Range(recipe, plain.param.clone())
    after = now.another()
    for g in grads(301, torch.float32, 10):
        now.apply(g * 100, out=after)  # this step is lost: taken again from what stayed
        now.apply(g, out=after)
        now, after = after, now
        plain.apply(g)
    assert torch.equal(now.param, plain.param)
    assert now.step == plain.step
    assert all(torch.equal(x, plain.state()[k]) for k, x in now.state().items())


@pytest.mark.parametrize("name", [*EXACT, *ROOTED])
def test_state_goes_to_torch_and_back(name):
    """Ranges load what torch's optimizer kept, and torch's optimizer what ranges kept: both go on with the same bits."""
    kind, groups = {**EXACT, **ROOTED}[name]
    p = torch.nn.Parameter(torch.linspace(-1, 1, 300, dtype=torch.float64))
    optimizer = kind([{"params": [p], **groups[-1]}])  # type: ignore[call-arg]
    whole = Range(recipe_of(optimizer)[0], p.detach().clone())
    for g in grads(300, torch.float64, 5):
        whole.apply(g)
    p.data.copy_(whole.param)
    optimizer.state[p] = {k: x.clone() for k, x in whole.state().items()}
    halves = [Range(whole.recipe, part.clone()) for part in whole.param.tensor_split(2)]
    for i, half in enumerate(halves):
        half.load({k: x if k == "step" else x.tensor_split(2)[i] for k, x in optimizer.state[p].items()})
    for g in grads(301, torch.float64, 5):
        p.grad = g[:300]
        optimizer.step()
        whole.apply(g[:300])
        for i, half in enumerate(halves):
            half.apply(g[:300].tensor_split(2)[i])
    assert torch.equal(torch.cat([half.param for half in halves]), whole.param)
    assert (p.detach() - whole.param).abs().max() <= 1e-15


def test_adagrads_first_value_is_the_optimizers_not_a_groups():
    """torch takes it from the constructor alone."""
    p = torch.nn.Parameter(torch.ones(50, dtype=torch.float64))
    groups = [{"params": [p], "initial_accumulator_value": 7.0}]
    optimizer = torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.25)
    one = Range(recipe_of(optimizer)[0], p.detach().clone())
    assert torch.equal(one.state()["sum"], optimizer.state[p]["sum"])
    assert torch.equal(one.state()["step"], optimizer.state[p]["step"])


def test_a_momentum_that_comes_and_goes():
    """OneCycleLR changes it; the buffer stays while it is 0, as torch's does."""
    p = torch.nn.Parameter(torch.ones(50, dtype=torch.float64))
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    one = Range(recipe_of(optimizer)[0], p.detach().clone())
    turns = [one, one.another()]
    for step, g in enumerate(grads(50, torch.float64, 12)):
        optimizer.param_groups[0]["momentum"] = momentum = 0.0 if step in (0, 4, 5) else 0.9
        p.grad = g
        optimizer.step()
        turns[0].apply(g, numbers={"momentum": momentum}, out=turns[1])
        turns.reverse()
    assert torch.equal(turns[0].param, p.detach())


def test_a_step_that_was_refused_leaves_a_range_as_it_was():
    one = Range(Recipe("adam", {}), torch.zeros(8))
    with pytest.raises(UsageError, match="must be alike"):
        one.apply(torch.zeros(9))
    assert (one.step, one.state()) == (0, {})


def test_a_range_keeps_to_its_optimizer():
    with pytest.raises(UsageError, match="a range of sgd was told to step by adam"):
        Range(Recipe("sgd", {}), torch.zeros(8)).apply(torch.zeros(8), numbers=Recipe("adam", {}))


def test_the_next_version_needs_memory_of_its_own():
    x = torch.zeros(8)
    with pytest.raises(UsageError, match="memory of its own"):
        Range(Recipe("sgd", {}), x).apply(x.clone(), out=Range(Recipe("sgd", {}), x))


def test_a_recipe_travels_as_plain_data():
    for name in REGISTERED:
        recipe = Recipe(name, {"lr": 0.5})
        assert Recipe.from_plain(json.loads(json.dumps(recipe.to_plain()))) == recipe
    assert Recipe("adamw", {}).numbers["weight_decay"] == 1e-2


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        ({"name": "adamm", "numbers": {}}, "Did you mean adam"),
        ({"name": "SGD ", "numbers": {}}, "Did you mean sgd"),
        ({"name": ["sgd"], "numbers": {}}, "Registered are sgd, adagrad"),
        (
            {"name": "sgd", "numbers": {"momentun": 0.9}},
            "Did you mean momentum.* It has lr, momentum, dampening",
        ),
        ({"name": "sgd", "numbers": {"beta1": 0.9}}, "sgd has no number 'beta1'"),
        ({"name": "sgd", "numbers": {3: 0.9}}, "sgd has no number 3"),
        ({"name": "sgd", "numbers": {"lr": "0.1"}}, "no finite number"),
        ({"name": "sgd", "numbers": {"lr": float("nan")}}, "no finite number"),
        ({"name": "sgd", "numbers": {"lr": 10**400}}, "no finite number"),
        ({"name": "sgd", "numbers": {"lr": True}}, "no finite number"),
        ({"name": "sgd", "numbers": {"nesterov": 1}}, "true or false"),
        ({"name": "sgd", "numbers": {"nesterov": True}}, "needs a momentum"),
        ({"name": "adam", "numbers": {"beta2": 1.0}}, "at least 0 and below 1"),
        ({"name": "adam", "numbers": {"lr": -1}}, "0 or more"),
        ({"name": "adam", "numbers": [1]}, "are a table"),
        ({"name": "adam"}, r"\{name, numbers\}"),
        (b"garbage", r"\{name, numbers\}, and this is bytes"),
    ],
)
def test_what_is_no_recipe_is_told_what_would_be(plain, says):
    with pytest.raises(UsageError, match=f"(?s){says}"):
        Recipe.from_plain(plain)


def test_recipe_of_reads_every_group_and_ignores_how_torch_would_step():
    groups = [
        {"params": [torch.zeros(2)]},
        {"params": [torch.zeros(3)], "lr": torch.tensor(0.5), "betas": (0.5, 0.6)},
    ]
    recipes = recipe_of(torch.optim.Adam(groups, lr=0.1, fused=True))
    assert [r.name for r in recipes] == ["adam", "adam"]
    assert [r.numbers["lr"] for r in recipes] == [0.1, 0.5]
    assert (recipes[1].numbers["beta1"], recipes[1].numbers["beta2"]) == (0.5, 0.6)
    assert recipe_of(torch.optim.Adam([torch.zeros(1)], decoupled_weight_decay=True))[0].name == "adamw"


class MyAdam(torch.optim.Adam):
    pass


class Sgd(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS: it calls the model again"),
        (lambda p: torch.optim.SparseAdam(p), "sparse gradients"),
        (lambda p: torch.optim.Adadelta(p), "they know sgd, adagrad"),
        (lambda p: MyAdam(p), "a class of its own, and may step otherwise than Adam"),
        (lambda p: Sgd(p, lr=0.1), "a class of its own, and may step otherwise than SGD"),
        (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), "no graph"),
        (lambda p: torch.optim.SGD([p[0].bfloat16()], lr=0.1), "bfloat16: servers know float32"),
    ],
)
def test_recipe_of_says_why_it_cannot(make, says):
    with pytest.raises(UsageError, match=says) as caught:
        recipe_of(make([torch.zeros(4)]))
    assert "apply=worker" in caught.value.remedy


def test_state_of_another_optimizer_is_refused():
    with pytest.raises(UsageError, match="sgd keeps no 'exp_avg'"):
        Range(Recipe("sgd", {}), torch.zeros(4)).load({"exp_avg": torch.zeros(4)})
    with pytest.raises(UsageError, match="without its step"):
        Range(Recipe("adam", {}), torch.zeros(4)).load({"exp_avg": torch.zeros(4)})
    with pytest.raises(UsageError, match="must be alike"):
        Range(Recipe("sgd", {}), torch.zeros(4)).load({"momentum_buffer": torch.zeros(5)})
