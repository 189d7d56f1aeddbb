"""Frames of the parameter server as values: what is believed and what is not; and the memory behind them."""

from __future__ import annotations

import itertools

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import UsageError, WireError
from echelon.ps import frame
from echelon.ps.frame import ANSWER, CALL, HEADER, INLINE, MAGIC, At, Limits, Room
from echelon.ps.memory import Arena, Mapped, Pool
from echelon.ps.reach import Address


def test_what_is_packed_is_read_back():
    head = [
        "tables.push",
        {"name": "w", "x": [1, None, 2.5, b"y"]},
        [[0, [2, 3], INLINE, 0], [8, [4], INLINE, 0]],
        [[24, 1, 64]],
    ]
    payload_bytes = 64 + 32
    data = frame.pack(CALL, 7, head, payload_bytes)
    header = frame.header(data[: HEADER.size], Limits())
    assert header == (CALL, 7, len(data) - HEADER.size, payload_bytes)
    verb, said, tensors, rooms = frame.read_call(frame.unpack(data[HEADER.size :]), payload_bytes)
    assert (verb, said) == ("tables.push", head[1])
    assert tensors == [At(0, [2, 3], 24, INLINE, 0), At(8, [4], 32, INLINE, 64)]
    assert rooms == [Room(24, 1, 64)]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (HEADER.pack(b"HTTP", CALL, 0, 0, 0), "no frame"),
        (HEADER.pack(MAGIC, 0, 0, 0, 0), "no frame"),
        (HEADER.pack(MAGIC, 7, 0, 0, 0), "no frame"),
        (HEADER.pack(MAGIC, CALL, 0, 1 << 31, 0), "a head of 2147483648"),
        (HEADER.pack(MAGIC, ANSWER, 0, 0, 1 << 40), "payload of 1099511627776"),
    ],
)
def test_a_header_is_refused_before_anything_behind_it_is_read(data, why):
    with pytest.raises(WireError, match=why):
        frame.header(data, Limits())


@pytest.mark.parametrize(
    ("tensors", "payload_bytes"),
    [
        ("x", 0), ([1], 0), ([[0, [1], INLINE]], 4), ([[0, 4, INLINE, 0]], 16), ([[99, [1], INLINE, 0]], 4), ([[True, [1], INLINE, 0]], 4),
        ([[0, [-1], INLINE, 0]], 0), ([[0, [1 << 49], INLINE, 0]], 0), ([[0, [1 << 30] * 3, INLINE, 0]], 0), ([[0, [1] * 33, INLINE, 0]], 4),
        ([[0, [True], INLINE, 0]], 4), ([[0, [1], -2, 0]], 0), ([[0, [1], 0, -4]], 0), ([[0, [1], "0", 0]], 0), ([[0, [2], INLINE, 0]], 4),
        ([], 1), ([[0, [1], 0, 0]], 4),
    ],
)  # fmt: skip
def test_tensors_that_cannot_be_are_refused(tensors, payload_bytes):
    with pytest.raises(WireError):
        frame.read_tensors(tensors, payload_bytes)


@pytest.mark.parametrize(
    "room", [[1, 2], [1, 2, "3"], [-1, 0, 0], [4, -2, 0], [4, 0, -1], [1 << 60, 0, 0], [True, 0, 0], "abc"]
)
def test_room_that_cannot_be_is_refused(room):
    with pytest.raises(WireError):
        frame.read_call(["v", {}, [], [room]], 0)


@given(st.recursive(st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text() | st.binary(),
                    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5), max_leaves=20))  # fmt: skip
def test_any_head_is_read_or_refused_and_never_more(value):
    data = msgpack.packb(value)
    assert frame.unpack(data) == value
    for read in (frame.read_call, frame.read_answer, frame.read_tensors):
        try:
            read(value, 0)
        except WireError:
            pass


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data):
    try:
        frame.unpack(data)
    except WireError:
        pass


def test_a_head_that_cannot_travel_is_told_to_its_sender():
    for value in (object(), 1 << 64, {"x": {1, 2}}):
        with pytest.raises(UsageError, match="cannot travel"):
            frame.pack(CALL, 0, value)


def test_an_address_is_read_back():
    for text in (
        "127.0.0.1:80",
        f"127.0.0.1:80/{'a' * 32}@{'b' * 32}",
        f"local/{'a' * 32}@{'b' * 32}",
        "[::1]:9",
    ):
        assert str(Address.parse(text)) == text
    for text in (
        "local",
        f"127.0.0.1:80/{'a' * 32}",
        "127.0.0.1:80/",
        "x",
        f"local/{'A' * 32}@{'b' * 32}",
        "1.2.3.4:99999",
    ):
        with pytest.raises(Exception, match=r"not .*address"):
            Address.parse(text)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 << 20)), min_size=1, max_size=40))
def test_buffers_of_an_arena_never_overlap_and_their_room_is_used_again(steps):
    shared: list[int] = []
    mapped = Mapped(Limits())

    def announce(fd: int, size: int) -> None:
        shared.append(size)
        mapped.add(fd, size)

    arena = Arena(announce, Limits())
    held: list[torch.Tensor] = []
    for number, (give, size) in enumerate(steps):
        if give and held:
            assert arena.give(held.pop(size % len(held)))
            continue
        buffer = arena.take(size)
        assert buffer.numel() == size
        assert buffer.data_ptr() % 64 == 0
        buffer.fill_(number % 251)
        held.append(buffer)
        if size:
            at = arena.find(buffer.data_ptr(), size)
            assert at is not None
            assert torch.equal(mapped.view(*at, size, frame.DTYPES.index(("uint8", 1)), [size]), buffer)
    spans = sorted((x.data_ptr(), x.data_ptr() + x.numel()) for x in held)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    for buffer in held:
        assert arena.give(buffer)
    before = list(shared)
    for size in sorted(before, reverse=True):
        arena.take(size)
    assert shared == before, "everything came back: each segment is one hole again"
    assert not arena.give(torch.zeros(3))
    assert arena.find(torch.zeros(3).data_ptr(), 12) is None


def test_a_view_outside_of_the_shared_memory_is_refused():
    mapped = Mapped(Limits())
    arena = Arena(mapped.add, Limits())
    size = arena.take(100).untyped_storage().nbytes()
    uint8, float64 = frame.DTYPES.index(("uint8", 1)), frame.DTYPES.index(("float64", 8))
    assert mapped.view(0, size - 8, 8, float64, [1]).numel() == 1
    for segment, offset, num_bytes, dtype, shape in ((0, size - 7, 8, uint8, [8]), (1, 0, 8, uint8, [8]), (0, 1 << 60, 1, uint8, [1]),
                                                     (0, 4, 8, float64, [1]), (0, 0, size + 1, uint8, [size + 1])):  # fmt: skip
        with pytest.raises(WireError):
            mapped.view(segment, offset, num_bytes, dtype, shape)


def test_a_pool_keeps_no_more_than_it_may():
    pool = Pool(keep_bytes=1 << 20)
    first = pool.take(300_000)
    assert first.numel() >= 300_000
    pool.give(first)
    assert pool.take(290_000).data_ptr() == first.data_ptr()
    for buffer in [pool.take(1 << 19) for _ in range(5)]:
        pool.give(buffer)
    assert pool._held_bytes <= 1 << 20
