"""Placement: every element once, balanced, the same on every rank; shares that load every link alike."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.ps.keys import ALIGN_BYTES, Holder, Tensor, place, traffic
from echelon.ps.shares import Shares, link_bytes, shares

MIB = 1 << 20


def model(*numels: int, itemsize: int = 4) -> list[Tensor]:
    return [Tensor(f"layer.{i}", n, itemsize, f"float{8 * itemsize}") for i, n in enumerate(numels)]


# shares


@pytest.mark.parametrize("n", range(2, 9))
def test_no_server_is_the_ring_and_as_many_as_workers_the_classic_server(n):
    assert shares(n, 0) == Shares(server=2 * (n - 1), worker=n)
    assert link_bytes(n, 0, n * MIB) == 2 * (n - 1) * MIB
    assert shares(n, n) == Shares(server=1, worker=0)
    assert link_bytes(n, n, MIB) == MIB
    assert link_bytes(n, n + 3, MIB) == MIB, "more servers than workers do not help"


@pytest.mark.case("ps: shares load every link alike")
@pytest.mark.parametrize("n", range(2, 9))
def test_every_link_carries_what_the_formula_says(n):
    for k in range(n + 1):
        share = shares(n, k)
        whole = k * share.server + n * share.worker
        worker, server = Fraction(share.worker, whole), Fraction(share.server, whole)
        loads = {1 - worker + (n - 1) * worker}
        loads |= {n * server} if k else set()
        assert loads == {Fraction(2 * n * (n - 1), n * n + k * n - 2 * k)}


def test_each_further_server_makes_it_faster_until_there_are_as_many_as_workers():
    times = [link_bytes(3, k, MIB) for k in range(5)]
    assert times[0] > times[1] > times[2] > times[3] == times[4]
    assert [float(t / MIB) for t in times[:4]] == pytest.approx([4 / 3, 6 / 5, 12 / 11, 1.0])


def test_one_worker_has_nothing_to_sum():
    assert shares(1, 2) == Shares(server=0, worker=1)
    assert link_bytes(1, 2, MIB) == 0


@given(st.integers(2, 6), st.integers(0, 8), st.lists(st.integers(1, 3 * MIB), min_size=3, max_size=12))
@settings(deadline=None, max_examples=60)
def test_placed_tensors_load_the_links_as_the_formula_says(n, k, numels):
    placement = place(model(16 * MIB, *numels), k, sharing_workers=n)
    total = sum(t.nbytes for t in placement.tensors)
    loads = traffic(placement, n)
    slack = n * 3 * 64 * 1024
    assert max(loads.values()) <= link_bytes(n, k, total) + slack
    assert len(loads) == n + k


# ranges

tensor_lists = st.lists(
    st.tuples(st.integers(0, 200_000), st.sampled_from([1, 2, 4, 8, 16])), min_size=0, max_size=20
).map(lambda sizes: [Tensor(f"t{i}", n, item, f"kind{item}") for i, (n, item) in enumerate(sizes)])


@pytest.mark.case("ps: placement")
@given(tensor_lists, st.integers(1, 9), st.integers(0, 4), st.booleans())
@settings(deadline=None)
def test_every_element_lies_with_exactly_one_holder_at_aligned_places(tensors, num_servers, workers, whole):
    placement = place(tensors, num_servers, sharing_workers=workers, whole=whole, piece_bytes=4096)
    assert [r.key for r in placement.ranges] == list(range(len(placement.ranges)))
    for tensor in tensors:
        pieces = placement.pieces(tensor.name)
        ends = [0, *(p.end for p in pieces)]
        assert [p.begin for p in pieces] == ends[:-1]
        assert ends[-1] == tensor.numel
        assert all(p.numel > 0 and p.begin * tensor.itemsize % ALIGN_BYTES == 0 for p in pieces)
        assert not (whole and len(pieces) > 1)
        assert len({p.holder for p in pieces}) == len(pieces), "one message a holder, not several"
    for holder in placement.holders:
        end = 0
        for r in placement.held_by(holder):
            assert r.offset_bytes % ALIGN_BYTES == 0
            assert r.offset_bytes >= end
            end = r.offset_bytes + r.nbytes
        assert end <= placement.memory_bytes(holder) < end + ALIGN_BYTES or end == 0


@given(tensor_lists, st.integers(1, 9))
@settings(deadline=None)
def test_servers_hold_the_same_bytes_to_within_two_pieces_and_so_does_every_beginning(tensors, num_servers):
    for upto in {len(tensors), len(tensors) // 2}:
        placement = place(tensors[:upto], num_servers, piece_bytes=4096)
        total = sum(t.nbytes for t in tensors[:upto])
        for holder in placement.holders:
            assert abs(placement.nbytes(holder) - total / num_servers) <= 2 * 4096 + ALIGN_BYTES * upto
        full = place(tensors, num_servers, piece_bytes=4096)
        assert placement.ranges == full.ranges[: len(placement.ranges)] or any(
            t.numel == 0 for t in tensors
        ), "what comes later does not move what came before"


def test_more_servers_than_tensors_each_hold_a_piece():
    placement = place(model(MIB), 5)
    assert [placement.nbytes(h) for h in placement.holders] == pytest.approx([4 * MIB / 5] * 5, abs=64)


def test_a_small_tensor_stays_whole_and_leaves_servers_empty():
    placement = place(model(100), 3)
    assert [placement.nbytes(h) for h in placement.holders] == [400, 0, 0]


def test_whole_tensors_go_to_who_holds_least_the_largest_first():
    placement = place(model(7, 6, 5, 4, 3, 2), 2, whole=True)
    assert [placement.nbytes(h) for h in placement.holders] == [4 * 14, 4 * 13]
    assert [r.holder.rank for r in placement.ranges] == [0, 1, 1, 0, 0, 1]


def test_an_element_is_found_and_an_unknown_one_is_an_error():
    placement = place(model(10, MIB), 2)
    for name, element in (("layer.0", 9), ("layer.1", 0), ("layer.1", MIB - 1), ("layer.1", MIB // 2)):
        found = placement.find(name, element)
        assert found.tensor.name == name
        assert found.begin <= element < found.end
        assert placement.ranges[found.key] is found
    for element in (-1, MIB):
        with pytest.raises(IndexError):
            placement.find("layer.1", element)
    with pytest.raises(KeyError):
        placement.find("layer.2", 0)


def test_placements_have_the_same_digest_only_where_they_are_equal():
    assert place(model(10, MIB), 2).digest == place(model(10, MIB), 2).digest
    others = [place(model(10, MIB), 3), place(model(MIB, 10), 2), place(model(10, MIB, itemsize=2), 2)]
    assert len({place(model(10, MIB), 2).digest, *(p.digest for p in others)}) == 4


def test_what_cannot_be_placed_is_refused():
    with pytest.raises(ValueError, match="one name"):
        place([*model(1), *model(1)], 1)
    with pytest.raises(ValueError, match="nobody"):
        place(model(1), 0)


def test_workers_alone_share_like_a_ring():
    placement = place(model(3 * MIB), 0, sharing_workers=3)
    assert [placement.nbytes(Holder("worker", r)) for r in range(3)] == [4 * MIB] * 3
