"""The contract of Group, as checks that every rank runs together. Any implementation passes all of them.

Numbers are small, so that they are exact in every type; expectations are taken in int64.
"""

from __future__ import annotations

import pytest
import torch

from echelon.clock import Deadline
from echelon.comm.group import Group, Met
from echelon.errors import UsageError
from echelon.mesh import moves

SOON_S = 60.0

SIZES = (0, 1, 7, 100_003)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
REAL = (*FLOATS, *INTEGERS, torch.bool)
ANY = (*REAL, torch.complex64, torch.complex128)
ARITHMETIC = ("sum", "avg", "min", "max", "prod")
BITS = ("and", "or", "xor")


def met(work):
    outcome = work.wait(Deadline.after(SOON_S))
    assert isinstance(outcome, Met), outcome
    return outcome


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype.is_complex:
        return ("sum", "avg")
    if dtype.is_floating_point:
        return ARITHMETIC
    return tuple(op for op in ARITHMETIC if op != "avg") + BITS


def numbers(rank: int, n: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """What a rank brings, as int64: 1 or 2, for bools 0 or 1; differs by rank, place and salt."""
    i = torch.arange(n)
    bits = (i * 3 + i // 7 + rank * 5 + rank * i + salt * 11) % 2
    return bits if dtype is torch.bool else bits + 1


def brings(rank: int, n: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    x = numbers(rank, n, dtype, salt)
    return torch.complex(x.double(), -2 * x.double()).to(dtype) if dtype.is_complex else x.to(dtype)


def expected(size: int, n: int, dtype: torch.dtype, op: str, salt: int = 0) -> torch.Tensor:
    stack = torch.stack([numbers(rank, n, dtype, salt) for rank in range(size)])
    if op in ("min", "max"):
        total = stack.amin(0) if op == "min" else stack.amax(0)
    elif op in ("sum", "avg"):
        total = stack.sum(0)
    elif op == "prod":
        total = stack.prod(0)
    else:
        total = stack[0].clone()
        for row in stack[1:]:
            total = {"and": total & row, "or": total | row, "xor": total ^ row}[op]
    if dtype.is_complex:
        total = torch.complex(total.double(), -2 * total.double())
    if op == "avg":
        return (total.to(torch.complex128 if dtype.is_complex else torch.float64) / size).to(dtype)
    return total.to(dtype)


def equal(got: torch.Tensor, want: torch.Tensor, op: str = "sum") -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if op == "avg":
        precision = torch.finfo(got.dtype).eps * 2
        wide = torch.complex128 if got.dtype.is_complex else torch.float64
        assert torch.allclose(got.to(wide), want.to(wide), rtol=precision, atol=0)
    else:  # by their bits: torch compares few of the unsigned types
        assert torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)), (got, want)


def sums(group: Group) -> None:
    for dtype in (torch.float32, torch.float64, torch.int64):
        x = torch.full((5,), group.rank + 1).to(dtype)
        met(group.all_reduce(x))
        assert x.tolist() == [group.size * (group.size + 1) // 2] * 5


def extremes(group: Group) -> None:
    x = torch.tensor([float(group.rank), -float(group.rank)])
    met(group.all_reduce(x, "max"))
    assert x.tolist() == [group.size - 1.0, 0.0]
    x = torch.tensor([float(group.rank)])
    met(group.all_reduce(x, "min"))
    assert x.item() == 0.0


def extremes_of_the_widest_integers(group: Group) -> None:
    top = 2**63
    x = torch.tensor([top - 1 + group.rank, group.rank], dtype=torch.uint64)
    met(group.all_reduce(x, "max"))
    assert x.tolist() == [top - 2 + group.size, group.size - 1]
    x = torch.tensor([-(2**63) + group.rank, 2**63 - 1 - group.rank])
    met(group.all_reduce(x, "min"))
    assert x.tolist() == [-(2**63), 2**63 - group.size]


def integers_wrap_around(group: Group) -> None:
    for dtype, most in (
        (torch.int8, 127),
        (torch.uint8, 255),
        (torch.int16, 32767),
        (torch.uint32, 2**32 - 1),
    ):
        x = torch.full((3,), most, dtype=dtype)
        met(group.all_reduce(x))
        bits = 8 * x.itemsize
        assert x.tolist()[0] % 2**bits == most * group.size % 2**bits


def all_reduces(group: Group) -> None:
    for dtype in ANY:
        for op in ops_of(dtype):
            for n in SIZES:
                x = brings(group.rank, n, dtype)
                met(group.all_reduce(x, op))
                equal(x, expected(group.size, n, dtype, op), op)


def reduce_scatters(group: Group) -> None:
    for dtype in ANY:
        for op in ops_of(dtype):
            for n in SIZES[:-1]:
                x = torch.stack([brings(group.rank, n, dtype, salt=r) for r in range(group.size)])
                kept, out = x.clone(), torch.empty(n, dtype=dtype)
                met(group.reduce_scatter(out, x, op))
                equal(out, expected(group.size, n, dtype, op, salt=group.rank), op)
                equal(x, kept)
    x = torch.arange(group.size * 300_009.0).view(group.size, 3, 100_003) + group.rank
    out = torch.empty(3, 100_003)
    met(group.reduce_scatter(out, x.clone()))
    equal(out, (x[group.rank] - group.rank) * group.size + sum(range(group.size)))


def reduces_to_any_root(group: Group) -> None:
    for root in range(group.size):
        for dtype in ANY:
            for op in ops_of(dtype):
                for n in SIZES if op == "sum" else SIZES[1:-1]:
                    x = brings(group.rank, n, dtype)
                    kept = x.clone()
                    met(group.reduce(x, root, op))
                    equal(x, expected(group.size, n, dtype, op) if group.rank == root else kept, op)


def gathers_in_rank_order(group: Group) -> None:
    x = torch.full((2, 3), group.rank)
    out = torch.zeros(group.size, 2, 3, dtype=torch.int64)
    met(group.all_gather(out, x))
    assert [int(out[r, 0, 0]) for r in range(group.size)] == list(range(group.size))


def all_gathers(group: Group) -> None:
    for dtype in ANY:
        for n in SIZES:
            out = torch.empty(group.size, n, dtype=dtype)
            met(group.all_gather(out, brings(group.rank, n, dtype)))
            equal(out, torch.stack([brings(r, n, dtype) for r in range(group.size)]))


def gathers_at_any_root(group: Group) -> None:
    for root in range(group.size):
        for dtype in ANY:
            for n in SIZES:
                out = torch.empty(group.size, n, dtype=dtype) if group.rank == root else None
                met(group.gather(out, brings(group.rank, n, dtype), root))
                if out is not None:
                    equal(out, torch.stack([brings(r, n, dtype) for r in range(group.size)]))


def scatters_from_any_root(group: Group) -> None:
    for root in range(group.size):
        for dtype in ANY:
            for n in SIZES:
                rows = torch.stack([brings(root, n, dtype, salt=r) for r in range(group.size)])
                out = torch.empty(n, dtype=dtype)
                met(group.scatter(out, rows if group.rank == root else None, root))
                equal(out, rows[group.rank])


def exchanges_uneven_pieces(group: Group) -> None:
    for dtype in ANY:
        for most in (0, 1, 3, 20_001):
            counts = [[(3 * a + 5 * b) % (most + 1) for b in range(group.size)] for a in range(group.size)]
            mine, theirs = counts[group.rank], [row[group.rank] for row in counts]
            x = torch.cat([brings(group.rank, n, dtype, salt=b) for b, n in enumerate(mine)])
            out = torch.empty(sum(theirs), dtype=dtype)
            met(group.all_to_all(out, x, theirs, mine))
            equal(out, torch.cat([brings(a, n, dtype, salt=group.rank) for a, n in enumerate(theirs)]))


def broadcasts_from_any_root(group: Group) -> None:
    for root in range(group.size):
        for dtype in ANY:
            for n in SIZES:
                x = brings(group.rank, n, dtype)
                met(group.broadcast(x, root))
                equal(x, brings(root, n, dtype))


def several_in_flight(group: Group) -> None:
    tensors = [torch.full((1000 * (i + 1),), float(group.rank + i)) for i in range(6)]
    works = [group.all_reduce(t) for t in tensors]
    for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        met(work)
        assert torch.all(tensor == sum(r + i for r in range(group.size)))


def different_operations_in_flight(group: Group) -> None:
    a, b = torch.full((1001,), float(group.rank)), torch.full((77,), group.rank)
    out, part = torch.zeros(group.size, 77, dtype=torch.int64), torch.zeros(5)
    rows = torch.ones(group.size, 5)
    works = [group.all_reduce(a), group.all_gather(out, b), group.reduce_scatter(part, rows), group.barrier()]
    for work in reversed(works):
        met(work)
    assert torch.all(a == sum(range(group.size)))
    assert out[:, 0].tolist() == list(range(group.size))
    assert part.tolist() == [group.size] * 5


def sends_around_a_ring(group: Group) -> None:
    if group.size == 1:
        return
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for dtype in ANY:
        for n in SIZES:
            out = torch.empty(n, dtype=dtype)
            works = [group.send(brings(group.rank, n, dtype), right), group.recv(out, left)]
            for work in works:
                met(work)
            equal(out, brings(left, n, dtype))


def messages_match_by_tag_and_come_in_order(group: Group) -> None:
    if group.size == 1:
        return
    if group.rank == 0:
        works = [
            group.send(torch.tensor([float(v)]), 1, tag) for v, tag in ((10, 5), (20, 6), (11, 5), (21, 6))
        ]
        for work in works:
            met(work)
    elif group.rank == 1:
        out = [torch.zeros(1) for _ in range(4)]
        works = [group.recv(x, 0, tag) for x, tag in zip(out, (6, 6, 5, 5), strict=True)]
        for work in reversed(works):
            met(work)
        assert [x.item() for x in out] == [20, 21, 10, 11]


def messages_are_no_part_of_the_common_order(group: Group) -> None:
    """A recv is begun before a collective, its send after it: neither waits for the other."""
    if group.size == 1:
        return
    x = torch.zeros(3)
    receipt = group.recv(x, 0, 9) if group.rank == 1 else None
    total = torch.ones(1)
    met(group.all_reduce(total))
    if group.rank == 0:
        met(group.send(torch.full((3,), 4.0), 1, 9))
    if receipt is not None:
        met(receipt)
        assert receipt.source == 0
        assert x.tolist() == [4.0] * 3


def receives_from_anybody(group: Group) -> None:
    if group.rank == 0:
        sources = set()
        for _ in range(group.size - 1):
            x = torch.zeros(2, dtype=torch.int64)
            receipt = group.recv(x, None, 3)
            met(receipt)
            assert x.tolist() == [receipt.source, 7]
            sources.add(receipt.source)
        assert sources == set(range(1, group.size))
    else:
        met(group.send(torch.tensor([group.rank, 7]), 0, 3))


def the_same_bits_everywhere(group: Group) -> None:
    generator = torch.Generator().manual_seed(group.rank)
    for dtype in FLOATS:
        x = torch.randn(100_003, generator=generator).to(dtype)
        met(group.all_reduce(x))
        every = torch.zeros(group.size, x.numel(), dtype=dtype)
        met(group.all_gather(every, x))
        assert all(torch.equal(every[r], x) for r in range(group.size))


def the_same_bits_from_run_to_run(group: Group) -> None:
    results = []
    for _ in range(3):
        x = torch.randn(100_003, generator=torch.Generator().manual_seed(group.rank))
        met(group.all_reduce(x))
        results.append(x)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def buffers_are_zeroed_and_reducible(group: Group) -> None:
    flat = group.buffer(400).view(torch.float32)
    assert flat.numel() == 100
    assert not flat.any()
    flat += 1.0
    met(group.all_reduce(flat))
    assert torch.all(flat == group.size)


def waiting_again_gives_the_same(group: Group) -> None:
    work = group.barrier()
    assert met(work) == met(work)


def tensors_of_no_and_of_many_dims(group: Group) -> None:
    x = torch.tensor(1.0)
    met(group.all_reduce(x))
    assert x.item() == group.size
    out = torch.zeros(group.size)
    met(group.all_gather(out, torch.tensor(float(group.rank))))
    assert out.tolist() == list(range(group.size))
    cube = torch.ones(2, 3, 4)
    met(group.all_reduce(cube))
    assert torch.all(cube == group.size)


def what_cannot_be_asked_is_told_before_anything_begins(group: Group) -> None:
    crooked, size = torch.zeros(4, 3).t(), group.size
    rows = torch.zeros(size, 2)
    me, elsewhere = group.rank, (group.rank + 1) % size
    wrong = {
        "not contiguous": [
            lambda: group.all_reduce(crooked),
            lambda: group.reduce_scatter(crooked, torch.zeros(size, 3, 4)),
            lambda: group.reduce_scatter(torch.zeros(3, 4), torch.zeros(size, 4, 3).transpose(1, 2)),
            lambda: group.reduce(crooked),
            lambda: group.all_gather(torch.zeros(size, 3, 4), crooked),
            lambda: group.gather(torch.zeros(size, 3, 4), crooked, me),
            lambda: group.scatter(crooked, torch.zeros(size, 3, 4), me),
            lambda: group.broadcast(crooked),
            lambda: group.all_to_all(torch.zeros(4)[::2], torch.zeros(2), [2] + [0] * (size - 1), [2] + [0] * (size - 1)),
        ],
        "for each of": [
            lambda: group.all_gather(torch.zeros(size + 1, 2), torch.zeros(2)),
            lambda: group.all_gather(torch.zeros(size, 2), torch.zeros(2, dtype=torch.int32)),
            lambda: group.reduce_scatter(torch.zeros(3), rows),
        ],
        "bits of integers": [lambda: group.all_reduce(torch.zeros(2), "or")],
        "would be rounded": [lambda: group.all_reduce(torch.zeros(2, dtype=torch.int32), "avg")],
        "not defined": [lambda: group.all_reduce(torch.zeros(2, dtype=torch.complex64), "max")],
        "no operation": [lambda: group.all_reduce(torch.zeros(2), "median")],
        "has ranks 0 to": [lambda: group.broadcast(torch.zeros(2), size), lambda: group.reduce(torch.zeros(2), -1)],
        "root must give": [lambda: group.gather(None, torch.zeros(2), me)],
        "do not cut": [lambda: group.all_to_all(torch.zeros(2), torch.zeros(2), [1] * (size + 1), [2] + [0] * (size - 1))],
        "itself": [lambda: group.send(torch.zeros(1), me), lambda: group.recv(torch.zeros(1), me)],
    }  # fmt: skip
    if size > 1:
        wrong["root alone"] = [lambda: group.scatter(torch.zeros(2), rows, elsewhere)]
    for words, calls in wrong.items():
        for call in calls:
            with pytest.raises(UsageError, match=words):
                call()
    met(group.barrier())


def counts_what_it_sends(group: Group) -> None:
    size, x = group.size, torch.zeros(600)
    rows, part = torch.zeros(size, 600), torch.zeros(600)
    root = size - 1
    at_root = rows if group.rank == root else None
    for verb, begin in {
        "all_reduce": lambda: group.all_reduce(x),
        "reduce_scatter": lambda: group.reduce_scatter(part, rows),
        "reduce": lambda: group.reduce(x, root),
        "all_gather": lambda: group.all_gather(rows, part),
        "gather": lambda: group.gather(at_root, part, root),
        "scatter": lambda: group.scatter(part, at_root, root),
        "broadcast": lambda: group.broadcast(x, root),
        "barrier": lambda: group.barrier(),
    }.items():
        before = group.sent_bytes
        met(begin())
        assert group.sent_bytes - before == pytest.approx(x.nbytes * moves.factor(verb, size)), verb
    before, counts = group.sent_bytes, [3] * size
    met(group.all_to_all(torch.zeros(3 * size), torch.zeros(3 * size), counts, counts))
    assert group.sent_bytes - before == 4 * 3 * (size - 1)
    if size > 1:
        before = group.sent_bytes
        sent = group.send(torch.zeros(25), (group.rank + 1) % size)
        met(group.recv(torch.zeros(25), (group.rank - 1) % size))
        met(sent)
        assert group.sent_bytes - before == 100


CHECKS = [
    sums, extremes, extremes_of_the_widest_integers, integers_wrap_around, all_reduces, reduce_scatters,
    reduces_to_any_root, gathers_in_rank_order, all_gathers, gathers_at_any_root, scatters_from_any_root,
    exchanges_uneven_pieces, broadcasts_from_any_root, several_in_flight, different_operations_in_flight,
    sends_around_a_ring, messages_match_by_tag_and_come_in_order, messages_are_no_part_of_the_common_order,
    receives_from_anybody, the_same_bits_everywhere, the_same_bits_from_run_to_run, buffers_are_zeroed_and_reducible,
    waiting_again_gives_the_same, counts_what_it_sends, tensors_of_no_and_of_many_dims, what_cannot_be_asked_is_told_before_anything_begins,
]  # fmt: skip
