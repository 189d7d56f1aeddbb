"""The kernels of the core against their twins in plain torch, on every instruction set that this processor has."""

from __future__ import annotations

import itertools

import pytest
import torch

from echelon import native
from echelon.comm.over_native import _DTYPES, _OPS
from echelon.native import reference

core = native.core()
pytestmark = pytest.mark.needs("core")

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIZES = (0, 1, 2, 7, 63, 1023, 1024, 1025, 5003)


@pytest.fixture(params=core.isas() if core else [""])
def isa(request):
    """Every instruction set in turn; the best one again afterwards."""
    assert core.choose(request.param)
    yield request.param
    core.choose("")


def values(dtype: torch.dtype, n: int, salt: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(salt)
    if dtype is torch.bool:
        return torch.rand(n, generator=g) > 0.5
    if dtype in FLOATS:
        x = torch.randn(n, generator=g) * torch.exp2(torch.randint(-14, 10, (n,), generator=g).float())
        for place, odd in enumerate((0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-8, 65519.0)):
            x[place + salt :: 97] = odd
        return x.to(dtype)
    raw = torch.randint(0, 256, (n * 8,), generator=g, dtype=torch.uint8)
    return raw.view(torch.int64).view(dtype)[:n].clone() if n else torch.empty(0, dtype=dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Equal for equal bits; all NaNs are one, and so are the two zeros (of which min and max may give either)."""
    if x.dtype in FLOATS:
        x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x + 0.0)
    return x.view(torch.uint8)


@pytest.mark.case("every kernel has a twin")
@pytest.mark.parametrize("dtype", list(_DTYPES), ids=str)
def test_fold_is_its_twin_bit_for_bit(isa, dtype):
    for op, n, num in itertools.product(_OPS, SIZES, (1, 2, 3, 5)):
        if not core.combines(_DTYPES[dtype], _OPS[op]) or (op == "avg" and dtype not in FLOATS):
            continue
        srcs = [values(dtype, n, salt) for salt in range(num)]
        mine, theirs = torch.empty(n, dtype=dtype), torch.empty(n, dtype=dtype)
        core.fold(mine.data_ptr(), [x.data_ptr() for x in srcs], n, _DTYPES[dtype], _OPS[op])
        reference.fold(theirs, srcs, op)
        assert torch.equal(bits(mine), bits(theirs)), (isa, op, n, num)


def test_fold_into_one_of_its_sources(isa):
    srcs = [values(torch.float32, 3001, salt) for salt in range(3)]
    wanted = torch.empty(3001)
    reference.fold(wanted, srcs, "sum")
    core.fold(srcs[1].data_ptr(), [x.data_ptr() for x in srcs], 3001, 0, 0)
    assert torch.equal(bits(srcs[1]), bits(wanted))


def test_what_cannot_be_combined_is_refused():
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="cannot be combined"):
        core.fold(x.data_ptr(), [x.data_ptr()], 4, _DTYPES[torch.float32], _OPS["xor"])
