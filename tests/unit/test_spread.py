"""Long ranges shared by threads of the core: the same bits for any number of them, and as without the core."""

from __future__ import annotations

import itertools
import os
import threading

import pytest
import torch
from torch import Tensor

from echelon import native
from echelon.errors import UsageError
from echelon.native import spread, threads, update
from tests.unit.test_update import ARRAYS, DTYPES, SWITCHES, bits, state_of, values

core = native.core()
pytestmark = pytest.mark.needs("core")

THREADS = (1, 2, 3, 5)
SIZES = (0, 1, 7, 8191, 32769, 100_003)
"""Around a block, around what is shared at all, and several blocks with an odd end."""


@pytest.fixture(autouse=True)
def _threads_as_before():
    yield
    threads.use(None)


def stepped(
    kind: str, n: int, dtype: torch.dtype, numbers: dict, num_parts: int, num_copies: int
) -> list[Tensor]:
    """Everything that a step leaves: values after it, state after it, copies; the version before it stays."""
    param, state = values(n, dtype, 0), state_of(kind, n, dtype)
    parts = [values(n, dtype, 20 + i, odd=i == 0) for i in range(num_parts)]
    after, state_after = torch.zeros_like(param), {k: torch.zeros_like(x) for k, x in state.items()}
    copies = [torch.zeros(n * dtype.itemsize + 24, dtype=torch.uint8) for _ in range(num_copies)]
    update.step_checked(
        kind, (param, after), parts, {k: (x, state_after[k]) for k, x in state.items()}, numbers, [(x, 8) for x in copies]
    )  # fmt: skip
    assert torch.equal(bits(param), bits(values(n, dtype, 0)))
    for x in copies:
        assert torch.equal(x[8 : 8 + n * dtype.itemsize], after.view(torch.uint8))
        assert not x[:8].any()
        assert not x[8 + n * dtype.itemsize :].any()
    return [after, *state_after.values()]


@pytest.mark.case("threads change no bit")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", list(ARRAYS))
def test_a_step_gives_the_same_bits_for_any_number_of_threads(kind, dtype):
    for n, (num_parts, num_copies) in itertools.product(SIZES, ((1, 0), (1, 1), (2, 2), (3, 0))):
        numbers = {**SWITCHES[kind][-1], "weight_decay": 0.01, "scale": -0.37}
        found = []
        for number in THREADS:
            threads.use(number)
            found.append(stepped(kind, n, dtype, numbers, num_parts, num_copies))
        for number, other in zip(THREADS[1:], found[1:], strict=True):
            same = [torch.equal(bits(a), bits(b)) for a, b in zip(found[0], other, strict=True)]
            assert all(same), (kind, n, number, num_parts)


@pytest.mark.needs("fused")
@pytest.mark.case("every kernel has a twin")
@pytest.mark.parametrize("kind", list(ARRAYS))
def test_a_step_of_parts_is_its_twin(kind, monkeypatch):
    threads.use(3)
    numbers = {**SWITCHES[kind][-1], "weight_decay": 0.01, "scale": 0.5}
    mine = stepped(kind, 70_001, torch.float32, numbers, 3, 2)
    monkeypatch.setattr(native, "core", lambda: None)
    theirs = stepped(kind, 70_001, torch.float32, numbers, 3, 2)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(mine, theirs, strict=True))


def test_parts_are_added_up_in_their_order():
    """In another order these float32 numbers have another sum."""
    parts = [torch.full((40_000,), x) for x in (1e8, -1e8, 1.0)]
    param, out = torch.zeros(40_000), torch.zeros(40_000)
    numbers = {**SWITCHES["sgd"][0], "weight_decay": 0.0, "scale": 1.0, "lr": 1.0}
    for order, sum_of_them in (([0, 1, 2], 1.0), ([0, 2, 1], 0.0)):
        update.step("sgd", (param, out), [parts[i] for i in order], {"momentum_buffer": None}, numbers)
        assert out.eq(-sum_of_them).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32], ids=str)
def test_sums_are_the_same_for_any_number_of_threads_and_without_the_core(dtype, monkeypatch):
    for n, num_parts in itertools.product(SIZES, (1, 2, 70)):
        parts = [(values(n, torch.float64, i, odd=False) * 8).to(dtype) for i in range(num_parts)]
        found = []
        for number in THREADS:
            threads.use(number)
            outs = [torch.empty(n, dtype=dtype) for _ in range(2)]
            spread.add(outs, parts)
            assert torch.equal(outs[0], outs[1])
            found.append(outs[0])
        with monkeypatch.context() as without:
            without.setattr(native, "core", lambda: None)
            spread.add([twin := torch.empty(n, dtype=dtype)], parts)
        assert all(torch.equal(x.view(torch.uint8), twin.view(torch.uint8)) for x in found), (n, num_parts)


def test_a_sum_may_take_the_place_of_a_part():
    threads.use(3)
    parts = [values(100_003, torch.float32, i, odd=False) for i in range(3)]
    spread.add([expected := torch.empty(100_003)], parts)
    spread.add([parts[1], parts[0]], parts)
    assert torch.equal(parts[0], expected)
    assert torch.equal(parts[1], expected)


def test_parts_of_another_kind_are_refused():
    with pytest.raises(UsageError, match="alike"):
        spread.add([torch.empty(4)], [torch.empty(4), torch.empty(5)])


def test_squares_and_looks_for_nan_do_not_depend_on_threads():
    for n in (*SIZES, 1_000_003):
        x = values(n, torch.float32, 1, odd=False)
        found = set()
        for number in THREADS:
            threads.use(number)
            found.add(update.sum_of_squares(x))
            assert update.finite(x)
            if n:
                y = x.clone()
                y[n - 1] = float("nan")
                assert not update.finite(y)
        assert len(found) == 1, n


@pytest.mark.parametrize("number", THREADS)
def test_copies_copy_every_byte(number):
    threads.use(number)
    for n in (0, 1, 3 << 20, (9 << 20) + 13):
        source = torch.randint(0, 255, (n + 5,), dtype=torch.uint8)
        into = torch.zeros(n + 9, dtype=torch.uint8)
        spread.copy(into[3 : 3 + n], source[5:])
        assert torch.equal(into[3 : 3 + n], source[5:])
        assert not into[:3].any()
        assert not into[3 + n :].any()


def test_one_bit_that_differs_is_seen(monkeypatch):
    """Also where numbers are equal: 0 and -0."""
    ones = [torch.zeros(n) for n in (3_000_001, 5, 0)]
    for with_core in (True, False):
        if not with_core:
            monkeypatch.setattr(native, "core", lambda: None)
        for number, place in itertools.product(THREADS, (0, 1_500_000, 3_000_000)):
            threads.use(number)
            others = [x.clone() for x in ones]
            assert spread.same(ones, others)
            others[0][place] = -0.0
            assert not spread.same(ones, others)
    with pytest.raises(UsageError, match="one size"):
        spread.same([torch.zeros(3)], [torch.zeros(4)])


@pytest.mark.case("threads change no bit")
def test_several_threads_may_have_long_ranges_at_a_time():
    threads.use(3)
    parts = [values(200_003, torch.float32, i, odd=False) for i in range(2)]
    expected = parts[0] + parts[1]
    wrong = []

    def sums() -> None:
        out = torch.empty_like(expected)
        for _ in range(100):
            spread.add([out.zero_()], parts)
            if not torch.equal(out, expected):
                wrong.append(threading.current_thread().name)

    callers = [threading.Thread(target=sums) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_a_forked_child_has_helpers_of_its_own():
    threads.use(3)
    x = torch.ones(1_000_000)
    assert update.sum_of_squares(x) == 1e6
    child = os.fork()
    if child == 0:
        right = update.sum_of_squares(x) == 1e6 and _helpers() == 2
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert update.sum_of_squares(x) == 1e6


def test_helpers_leave_signals_to_others():
    threads.use(2)
    update.sum_of_squares(torch.ones(1_000_000))
    for task in os.listdir("/proc/self/task"):
        told = _told(task)
        if told.get("Name") == "echelon-crew":
            assert int(told["SigBlk"], 16) >> 1 & 1  # SIGINT's bit is 1


def _told(task: str) -> dict[str, str]:
    try:
        with open(f"/proc/self/task/{task}/status") as file:
            return {key: value.strip() for key, _, value in (line.partition(":") for line in file)}
    except FileNotFoundError:
        return {}


def _helpers() -> int:
    return sum(_told(task).get("Name") == "echelon-crew" for task in os.listdir("/proc/self/task"))
