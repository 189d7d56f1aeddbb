"""Optimizer steps of the core against their twins in plain torch, on every instruction set that this processor has: the same bits."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time

import pytest
import torch
from torch import Tensor

from echelon import native
from echelon.errors import UsageError
from echelon.native import reference_update as reference
from echelon.native import update

core = native.core()
pytestmark = pytest.mark.needs("core", "fused")

SIZES = (0, 1, 7, 17, 1023, 4099)
DTYPES = (torch.float32, torch.float64)

ARRAYS = {
    "sgd": ["momentum_buffer"], "adagrad": ["sum"], "rmsprop": ["square_avg", "momentum_buffer", "grad_avg"],
    "adam": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
}  # fmt: skip
SQUARES = ("sum", "square_avg", "exp_avg_sq", "max_exp_avg_sq")
SWITCHES = {
    "sgd": [
        {"lr": 0.1, "momentum": m, "dampening": d, "nesterov": n, "first": f}
        for m, d, n, f in itertools.product((0.0, 0.9), (0.0, 0.3), (False, True), (False, True))
    ],
    "adagrad": [{"lr": 0.03, "eps": 1e-10}],
    "rmsprop": [
        {"lr": 0.01, "alpha": a, "eps": 1e-8, "momentum": m, "centered": c}
        for a, m, c in itertools.product((0.99, 0.3), (0.0, 0.9), (False, True))
    ],
    "adam": [
        {"step_size": 0.002, "beta1": b, "beta2": 0.999, "eps": 1e-8, "correction": 0.0316, "shrink": s, "amsgrad": a}
        for b, s, a in itertools.product((0.9, 0.2), (1.0, 0.999), (False, True))
    ],
}  # fmt: skip


@pytest.fixture(params=core.isas() if core else [""])
def isa(request):
    """Every instruction set in turn; the best one again afterwards."""
    assert core.choose(request.param)
    yield request.param
    core.choose("")


def values(n: int, dtype: torch.dtype, salt: int, odd: bool = True) -> Tensor:
    g = torch.Generator().manual_seed(salt)
    x = torch.randn(n, generator=g, dtype=dtype) * torch.exp2(
        torch.randint(-20, 10, (n,), generator=g).to(dtype)
    )
    if odd:
        for place, one in enumerate((0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-42, 1e30)):
            x[place + salt :: 97] = one
    return x


def bits(x: Tensor) -> Tensor:
    """Equal for equal bits; all NaNs are one."""
    return torch.where(x.isnan(), torch.full_like(x, float("nan")), x).view(torch.uint8)


def state_of(kind: str, n: int, dtype: torch.dtype) -> dict[str, Tensor]:
    made = {name: values(n, dtype, 5 + i) for i, name in enumerate(ARRAYS[kind])}
    return {name: x.abs() if name in SQUARES else x for name, x in made.items()}


@pytest.mark.case("every kernel has a twin")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", list(ARRAYS))
def test_a_step_is_its_twin_bit_for_bit(isa, kind, dtype):
    for n, own, decay, scale in itertools.product(SIZES, SWITCHES[kind], (0.0, 0.01), (1.0, -0.37)):
        numbers = {**own, "weight_decay": decay, "scale": scale}
        param, grad, state = values(n, dtype, 0), values(n, dtype, 1), state_of(kind, n, dtype)
        mine, theirs = param.clone(), param.clone()
        my_state = {k: x.clone() for k, x in state.items()}
        update.step(kind, (mine, mine), grad, {k: (x, x) for k, x in my_state.items()}, numbers)
        getattr(reference, kind)(theirs, grad, **state, **numbers)
        assert torch.equal(bits(mine), bits(theirs)), (isa, n, numbers)
        for name, x in state.items():
            assert torch.equal(bits(my_state[name]), bits(x)), (isa, n, numbers, name)


@pytest.mark.parametrize("kind", list(ARRAYS))
def test_the_version_before_a_step_stays(isa, kind):
    for own in SWITCHES[kind]:
        numbers = {**own, "weight_decay": 0.01, "scale": 0.5}
        param, grad, state = (
            values(3001, torch.float32, 0),
            values(3001, torch.float32, 1),
            state_of(kind, 3001, torch.float32),
        )
        kept = {"param": param.clone(), **{k: x.clone() for k, x in state.items()}}
        after, state_after = param.clone().fill_(7), {k: x.clone() for k, x in state.items()}
        update.step(kind, (param, after), grad, {k: (x, state_after[k]) for k, x in state.items()}, numbers)
        for name, x in {"param": param, **state}.items():
            assert torch.equal(bits(x), bits(kept[name])), name
        getattr(reference, kind)(param, grad, **state, **numbers)
        assert torch.equal(bits(after), bits(param))
        assert all(torch.equal(bits(state_after[k]), bits(x)) for k, x in state.items())


@pytest.mark.parametrize("kind", list(ARRAYS))
def test_a_step_cut_anywhere_gives_the_same_bits(isa, kind):
    """However servers share a tensor: element i is the same."""
    n, numbers = 5003, {**SWITCHES[kind][-1], "weight_decay": 0.01, "scale": 0.5}
    param, grad, state = (
        values(n, torch.float32, 0),
        values(n, torch.float32, 1),
        state_of(kind, n, torch.float32),
    )
    whole, whole_state = param.clone(), {k: x.clone() for k, x in state.items()}
    update.step(kind, (whole, whole), grad, {k: (x, x) for k, x in whole_state.items()}, numbers)
    cuts = [0, *sorted(random.Random(3).sample(range(1, n), 9)), n]
    for a, b in itertools.pairwise(cuts):
        part = {k: (x[a:b], x[a:b]) for k, x in state.items()}
        update.step(kind, (param[a:b], param[a:b]), grad[a:b], part, numbers)
    assert torch.equal(bits(param), bits(whole))
    assert all(torch.equal(bits(x), bits(whole_state[k])) for k, x in state.items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_averages_sums_of_squares_and_looks_for_nan_are_their_twins(isa, dtype):
    for n in (*SIZES, 100_003):
        x, average = values(n, dtype, 1, odd=False), values(n, dtype, 2)
        for weight in (0.001, 0.5, 0.9):
            mine, theirs = average.clone(), average.clone()
            update.average((mine, mine), x, weight)
            reference.average(theirs, x, weight)
            assert torch.equal(bits(mine), bits(theirs)), (isa, n, weight)
        assert update.sum_of_squares(x) == reference.sum_of_squares(x), (isa, n)
        assert update.sum_of_squares(x) == pytest.approx(float(x.double().square().sum()), rel=1e-13)
        assert update.finite(x)
        for odd in (float("nan"), float("inf"), float("-inf")):
            for place in {0, n // 2, n - 1} if n else ():
                y = x.clone()
                y[place] = odd
                assert not update.finite(y), (isa, n, place, odd)


def test_a_sum_of_squares_that_float32_cannot_hold():
    x = torch.full((1000,), 1e30)
    assert update.sum_of_squares(x) == pytest.approx(1e63, rel=1e-6)


def test_without_the_core_the_twins_run(monkeypatch):
    param, grad = values(999, torch.float64, 0), values(999, torch.float64, 1)
    numbers = {**SWITCHES["sgd"][0], "weight_decay": 0.1, "scale": 2.0}
    with_core, without, untouched = torch.empty_like(param), torch.empty_like(param), param.clone()
    update.step("sgd", (param, with_core), grad, {"momentum_buffer": None}, numbers)
    monkeypatch.setattr(native, "core", lambda: None)
    update.step("sgd", (param, without), grad, {"momentum_buffer": None}, numbers)
    assert torch.equal(bits(with_core), bits(without))
    assert torch.equal(bits(param), bits(untouched))
    assert update.sum_of_squares(torch.ones(5)) == 5.0
    assert not update.finite(param)


def test_python_goes_on_while_a_step_runs():
    """The step holds no lock of Python: another thread runs in many of the milliseconds that it takes."""
    x, grad = torch.zeros(40_000_000), torch.ones(40_000_000)
    numbers = {**SWITCHES["sgd"][0], "weight_decay": 0.1, "scale": 1.0}
    inside, ran_in = threading.Event(), set()

    def one_step() -> None:
        inside.set()
        update.step("sgd", (x, x), grad, {"momentum_buffer": None}, numbers)
        inside.clear()

    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    core.choose("plain")  # the slowest
    try:
        thread = threading.Thread(target=one_step)
        thread.start()
        while thread.is_alive():
            if inside.is_set():
                ran_in.add(int(time.perf_counter() * 1000))
        thread.join()
    finally:
        core.choose("")
        sys.setswitchinterval(switch_s)
    assert len(ran_in) >= 10


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (torch.zeros(4, dtype=torch.float16), "float16"),
        (torch.zeros(2, 2), r"\[2, 2\]"),
        (torch.zeros(8)[::2], "strided"),
        (torch.zeros(5), "must be alike"),
        (torch.zeros(4, dtype=torch.float64), "must be alike"),
    ],
)
def test_what_is_no_range_is_refused(wrong, says):
    x = torch.zeros(4)
    with pytest.raises(UsageError, match=says):
        update.step("sgd", (x, x), wrong, {"momentum_buffer": None}, {})


def test_a_missing_array_is_refused_by_the_core():
    x = torch.zeros(4)
    numbers = {**SWITCHES["sgd"][-1], "weight_decay": 0.0, "scale": 1.0}
    with pytest.raises(ValueError, match="missing"):
        update.step("sgd", (x, x), x.clone(), {"momentum_buffer": None}, numbers)
