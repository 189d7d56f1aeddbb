"""Gradients that are on servers, and how buckets are cut for servers that sum."""

from __future__ import annotations

import copy
from fractions import Fraction

import pytest
import torch
from torch import nn

from echelon.errors import UsageError
from echelon.parallel.elsewhere import OnServers
from echelon.parallel.sums import LEAST_BYTES, cut, servers_share


@pytest.fixture
def weight() -> nn.Parameter:
    param = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
    param.grad = OnServers.of("head.weight", param)
    return param


def test_a_parameter_that_is_a_single_number_has_such_a_gradient_as_well():
    scale = nn.Parameter(torch.tensor(1.5))
    scale.grad = OnServers.of("scale", scale)
    assert scale.grad.shape == ()


USES = {
    "norm": lambda p: p.grad.norm(), "item": lambda p: p.grad.sum().item(), "add": lambda p: p.grad + 1, "radd": lambda p: 1 + p.grad,
    "mul_": lambda p: p.grad.mul_(0.5), "imul": lambda p: p.grad.__imul__(0.5), "clamp_": lambda p: p.grad.clamp_(-1, 1),
    "zero_": lambda p: p.grad.zero_(), "data": lambda p: p.grad.data, "detach": lambda p: p.grad.detach(),
    "clone": lambda p: p.grad.clone(), "copy_": lambda p: p.grad.copy_(p), "into another": lambda p: torch.zeros(3, 4).copy_(p.grad),
    "index": lambda p: p.grad[0], "set an element": lambda p: p.grad.__setitem__(0, 1.0), "isnan": lambda p: torch.isnan(p.grad).any(),
    "isfinite": lambda p: p.grad.isfinite(), "compare": lambda p: p.grad > 0, "truth": lambda p: bool(p.grad), "float": lambda p: p.grad.float(),
    "cpu": lambda p: p.grad.cpu(), "to": lambda p: p.grad.to(torch.float32), "numpy": lambda p: p.grad.numpy(),
    "tolist": lambda p: p.grad.tolist(), "view": lambda p: p.grad.view(-1), "flatten": lambda p: p.grad.flatten(),
    "T": lambda p: p.grad.T, "iterate": lambda p: list(p.grad), "stack": lambda p: torch.stack([p.grad]), "cat": lambda p: torch.cat((p.grad, p)),
    "foreach": lambda p: torch._foreach_norm([p.grad]), "foreach_mul_": lambda p: torch._foreach_mul_([p.grad], 0.5),
    "equal": lambda p: torch.equal(p.grad, p), "matmul": lambda p: p @ p.grad.mT, "where": lambda p: torch.where(p.grad > 0, p, p),
    "deepcopy": lambda p: copy.deepcopy(p.grad), "add into the weight": lambda p: p.data.add_(p.grad, alpha=-0.1),
    "requires_grad_": lambda p: p.grad.requires_grad_(), "save": lambda p: torch.save(p.grad, "/dev/null"),
    "clip_grad_norm_": lambda p: nn.utils.clip_grad_norm_([p], 1.0), "clip_grad_value_": lambda p: nn.utils.clip_grad_value_([p], 1.0),
    "get_total_norm": lambda p: nn.utils.get_total_norm([p.grad]), "a plain optimizer": lambda p: torch.optim.SGD([p], 0.1).step(),
    "adam": lambda p: torch.optim.Adam([p], 0.1).step(), "vector": lambda p: nn.utils.parameters_to_vector([p.grad]),
}  # fmt: skip


@pytest.mark.case("ps: .grad of apply=server is never silently a part")
@pytest.mark.parametrize("use", USES)
def test_whoever_uses_a_gradient_that_is_on_servers_is_told(weight, use):
    with torch.no_grad(), pytest.raises(UsageError) as told:
        USES[use](weight)
    assert "the gradient of `head.weight` is not here" in str(told.value)
    assert "run.clip_grad_norm(model, max_norm)" in str(told.value)
    assert "apply=worker" in str(told.value)
    assert torch.equal(weight.detach(), torch.ones(3, 4, dtype=torch.float64))


def test_what_needs_no_numbers_can_be_asked(weight):
    grad = weight.grad
    assert grad is not None
    assert (grad.shape, grad.dtype, grad.device, grad.ndim, grad.numel()) == (
        (3, 4),
        torch.float64,
        torch.device("cpu"),
        2,
        12,
    )
    assert (grad.size(), grad.size(1), grad.dim(), len(grad)) == ((3, 4), 4, 2, 3)
    assert not grad.is_sparse
    assert grad.is_floating_point()
    assert repr(grad) == str(grad) == f"{grad}" == "<gradient of head.weight, on the servers>"
    assert f"{[grad]}" == "[<gradient of head.weight, on the servers>]"
    assert {grad: 2}[grad] == 2
    assert isinstance(grad, torch.Tensor)


def test_it_holds_no_memory_and_goes_with_zero_grad(weight):
    huge = nn.Parameter(torch.empty(1).expand(1 << 20, 1 << 10))
    made = OnServers.of("huge", huge)
    assert (made.stride(), made.numel()) == ((0, 0), 1 << 30)  # one element, seen many times
    optimizer = torch.optim.SGD([weight], 0.1)
    optimizer.zero_grad()
    assert weight.grad is None


# numel, bytes of one, share, servers -> elements of each server; the rest is the workers'
CUTS = [
    (1_000_000, 4, Fraction(0), 2, []),
    (1_000_000, 4, Fraction(1), 0, []),
    (1_000_000, 4, Fraction(1, 2), 1, [(0, 500_000)]),
    (1_000_000, 4, Fraction(1, 2), 2, [(0, 250_000), (250_000, 500_000)]),
    (1_000_001, 4, Fraction(1), 2, [(0, 500_000), (500_000, 1_000_001)]),
    (1_000_000, 8, Fraction(1, 3), 1, [(0, 333_328)]),  # whole lines of 64 bytes
    (LEAST_BYTES // 4 * 2, 4, Fraction(1, 2), 1, [(0, LEAST_BYTES // 4)]),
    (LEAST_BYTES // 4 * 2 - 32, 4, Fraction(1, 2), 1, []),  # not worth a message
    (100, 4, Fraction(1), 1, [(0, 100)]),  # all of it is all of it
    (100, 4, Fraction(1), 3, [(0, 32), (32, 64), (64, 100)]),
    (20, 4, Fraction(1), 3, []),  # fewer than a line for each: the workers' own
    (0, 4, Fraction(1), 1, []),
]


@pytest.mark.case("ps: shares load every link alike")
@pytest.mark.parametrize(("numel", "itemsize", "share", "servers", "pieces"), CUTS)
def test_where_a_bucket_is_cut(numel, itemsize, share, servers, pieces):
    assert cut(numel, itemsize, share, servers) == pieces


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_pieces_follow_each_other_at_whole_lines_and_hold_the_share(itemsize, servers):
    for numel in (1 << 20, 999_983, 3_000_017):
        for share in (Fraction(1, 4), Fraction(2, 5), Fraction(1)):
            pieces = cut(numel, itemsize, share, servers)
            if not pieces:
                assert numel * share * itemsize / servers < LEAST_BYTES + 64
                continue
            assert [begin for begin, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
            assert all(begin * itemsize % 64 == 0 for begin, _ in pieces)
            assert 0 <= numel * share - pieces[-1][1] < servers * 64
            assert share < 1 or pieces[-1][1] == numel


# hosts of workers, hosts of servers -> what servers take
SHARES = [
    (["a"], ["a"], 0),  # one host: no link is spared
    (["a", "a", "a"], ["a", "a"], 0),
    (["a", "b"], ["a", "b"], 0),
    (["a", "b", "c"], [], 0),
    (["a"], ["s"], 0),  # nothing to sum between hosts
    (["a", "a"], ["s"], 0),
    (["a", "b", "c"], ["s"], Fraction(2 * 2, 3 * 3 + 3 - 2)),
    (["a", "b", "c"], ["s", "t"], Fraction(2 * 2 * 2, 3 * 3 + 2 * 3 - 2 * 2)),
    (["a", "b", "c"], ["s", "t", "u"], 1),
    (["a", "b", "c"], ["s", "s", "t"], Fraction(8, 11)),  # a host counts once
    (["a", "b", "c"], ["a", "s"], Fraction(4, 10)),  # a worker's host has no link to spare
    (["a", "a", "b", "b", "c"], ["s"], Fraction(4, 10)),  # workers of one host meet in its memory
]


@pytest.mark.case("ps: shares load every link alike")
@pytest.mark.parametrize(("workers", "servers", "share"), SHARES)
def test_servers_take_what_their_links_add(workers, servers, share):
    taken = servers_share(workers, servers)
    assert (
        share * Fraction(3, 4) <= taken <= share
    )  # a little less than the formula: they are done a little earlier
