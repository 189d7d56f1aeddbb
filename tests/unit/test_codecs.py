"""Codecs: ratio, error, non-finite numbers, and that whoever decodes the same bytes gets the same bits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon import coding
from echelon.comm.codecs import lowrank
from echelon.comm.codecs.codec import BLOCK, padded
from echelon.comm.codecs.named import codec_for
from echelon.comm.codecs.plan import plan
from echelon.errors import StrategyError

ROWS = ["fp16", "bf16", "int8", "1bit", "topk:0.01", "topk:0.1"]


def codec(text):
    compression = coding.read(text)
    assert compression is not None
    return codec_for(compression)


def there_and_back(text, x):
    made = codec(text)
    payload = made.encode(x)
    assert payload.dtype is torch.uint8
    assert payload.shape == (x.shape[0], made.payload_bytes(x.shape[1]))
    out = made.decode(payload, x.shape[1], x.dtype)
    assert out.shape == x.shape
    assert out.dtype is x.dtype
    return out


def test_a_value_of_compress_is_a_name_and_a_number():
    assert coding.read("none") is None
    assert coding.read("int8") == coding.Compression("int8")
    assert coding.read("topk") == coding.Compression("topk", 0.01)
    assert coding.read("powersgd:8") == coding.Compression("powersgd", 8.0)
    assert str(coding.read("topk:0.05")) == "topk:0.05"
    with pytest.raises(StrategyError, match="takes no number"):
        coding.read("none:1")


@pytest.mark.case("compress: ratio and error")
@pytest.mark.parametrize(
    ("text", "ratio", "error"),
    [
        ("fp16", 1.99, 2**-11),
        ("bf16", 1.99, 2**-8),
        ("int8", 3.95, 0.012),
        ("1bit", 30.0, 0.61),
        ("topk:0.01", 65.0, 0.97),
        ("topk:0.1", 6.6, 0.75),
    ],
)
def test_each_has_its_ratio_and_error(text, ratio, error):
    torch.manual_seed(0)
    x = torch.randn(1, 64 * 4096)
    out = there_and_back(text, x)
    assert x.nbytes / codec(text).payload_bytes(x.shape[1]) >= ratio
    assert float((x - out).norm() / x.norm()) <= error


numbers = st.floats(
    width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100
)
lengths = st.one_of(st.integers(1, 40), st.sampled_from([BLOCK, 2 * BLOCK]))


@st.composite
def rows(draw):
    length, num_rows = draw(lengths), draw(st.integers(1, 3))
    some = draw(st.lists(numbers, min_size=1, max_size=40))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    flat = torch.tensor(some, dtype=dtype).repeat(-(-length * num_rows // len(some)))
    return flat[: length * num_rows].view(num_rows, length).clone()


@pytest.mark.case("compress: properties")
@settings(max_examples=60, deadline=None)
@given(x=rows())
@pytest.mark.parametrize("text", ROWS)
def test_the_error_is_bounded_and_decoding_a_part_is_a_part_of_decoding(text, x):
    before = x.clone()
    made, out = codec(text), there_and_back(text, x)
    assert torch.equal(x, before)
    assert torch.isfinite(out).all()
    largest = x.abs().reshape(-1, min(BLOCK, x.shape[1])).amax(1, keepdim=True)
    error = (x - out).abs().reshape(largest.shape[0], -1)
    tiny = 1e-37
    whole = x.abs().amax(1, keepdim=True).double()
    if text == "fp16":
        assert ((x - out).double().abs() <= x.double().abs() * 2**-11 + whole * 2**-38 + tiny).all()
    elif text == "bf16":
        assert ((x - out).double().abs() <= x.double().abs() * 2**-8 + tiny).all()
    elif text == "int8":
        assert (error.double() <= largest.double() * (0.5 / 127 + 1e-6) + tiny).all()
    else:
        assert (error.double() <= largest.double() * (1 + 1e-6) + tiny).all()
    payload = made.encode(x)
    for row in range(x.shape[0]):
        assert torch.equal(made.decode(payload[row : row + 1], x.shape[1], x.dtype)[0], out[row])


@pytest.mark.parametrize("text", ROWS)
def test_zero_stays_zero(text):
    assert torch.equal(there_and_back(text, torch.zeros(2, 512)).abs(), torch.zeros(2, 512))


@pytest.mark.case("compress: NaN and infinity are seen")
@pytest.mark.parametrize("text", ROWS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_comes_out_so(text, value):
    x = torch.randn(1, 2 * BLOCK)
    x[0, 700] = value
    out = there_and_back(text, x)
    assert not torch.isfinite(out[0, BLOCK:]).all()


@pytest.mark.parametrize("text", ROWS)
def test_large_and_small_numbers_survive(text):
    for scale in (1e-30, 1e30):
        x = torch.full((1, 16), scale)
        assert torch.allclose(there_and_back(text, x).amax(), x.amax(), rtol=0.01, atol=0.0)


# -- PowerSGD ------------------------------------------------------------------------------------------------------


def test_a_matrix_is_coded_where_it_pays():
    assert lowrank.matrix_of((64, 128), (128, 1), 4) == (64, 128)
    assert lowrank.matrix_of((64, 128), (1, 64), 4) == (128, 64), "as it lies in memory"
    assert lowrank.matrix_of((32, 16, 3, 3), (144, 1, 48, 16), 2) == (32, 144), "channels_last"
    assert lowrank.matrix_of((4, 128), (128, 1), 4) is None
    assert lowrank.matrix_of((100,), (1,), 1) is None


def test_columns_become_orthonormal_and_dependent_ones_zero():
    torch.manual_seed(0)
    p = torch.randn(50, 4)
    p[:, 2] = p[:, 0] * 2 - p[:, 1]
    out = lowrank.orthonormal(p)
    gram = out.t() @ out
    assert torch.allclose(gram, torch.diag(torch.tensor([1.0, 1.0, 0.0, 1.0])), atol=1e-5)
    assert torch.equal(lowrank.orthonormal(torch.zeros(5, 2)), torch.zeros(5, 2))
    assert lowrank.orthonormal(torch.full((5, 2), math.nan)).isnan().all()


def test_a_direction_that_became_zero_starts_anew():
    first = lowrank.start("a.weight", 6, 2, torch.zeros(0))
    assert torch.equal(first, lowrank.start("a.weight", 6, 2, torch.zeros(0)))
    q = torch.ones(6, 2)
    q[:, 1] = 0
    revived = lowrank.revived(q, first)
    assert torch.equal(revived[:, 0], q[:, 0])
    assert torch.equal(revived[:, 1], first[:, 1])


# -- the plan ------------------------------------------------------------------------------------------------------


@pytest.mark.case("compress: how coded rows meet")
@pytest.mark.parametrize(
    ("numel", "itemsize", "ranks", "text", "form"),
    [
        (1 << 20, 4, 1, "int8", "exact"),
        (1 << 20, 4, 2, "int8", "gather"),
        (1 << 20, 4, 3, "int8", "scatter"),
        (1 << 20, 4, 8, "topk:0.01", "gather"),
        (1 << 20, 4, 64, "topk:0.01", "scatter"),
        (5000, 4, 3, "int8", "gather"),
        (100, 4, 64, "fp16", "exact"),
        (1 << 20, 2, 4, "bf16", "exact"),
    ],
)
def test_the_plan_sends_the_fewest_bytes(numel, itemsize, ranks, text, form):
    made = plan(numel, itemsize, ranks, codec(text))
    assert made.form == form, made.why
    assert made.sent_bytes <= made.plain_bytes


@given(numel=st.integers(1, 10**7), ranks=st.integers(1, 64), text=st.sampled_from(ROWS))
def test_slices_cover_the_bucket_and_never_more_is_sent(numel, ranks, text):
    made = plan(numel, 4, ranks, codec(text))
    assert made.sent_bytes <= made.plain_bytes
    if made.form == "scatter":
        assert made.numel * ranks >= numel
    if made.form != "exact":
        assert padded(made.numel) == made.numel
