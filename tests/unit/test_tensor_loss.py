"""Cross-entropy of logits that are dealt by classes, over threads: torch's numbers, and the logits are not gathered for it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from echelon.errors import LoopError, StrategyError
from echelon.parallel.tensor import form
from echelon.parallel.tensor.layers import taken
from echelon.parallel.tensor.outputs import DealtTensor
from echelon.prepare.selfcheck import divisor_of
from tests.unit.test_tensor_layers import on_threads, refuse

D = torch.float64
CLASSES, WIDTH = 11, 6


class Counted:
    """A group that counts what it is asked to move."""

    def __init__(self, inner):
        self.inner, self.moved = inner, {}

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def all_gather(self, out, x):
        self.moved["all_gather"] = self.moved.get("all_gather", 0) + out.numel()
        return self.inner.all_gather(out, x)

    def all_reduce(self, x, op="sum"):
        self.moved["all_reduce"] = self.moved.get("all_reduce", 0) + x.numel()
        return self.inner.all_reduce(x, op)


class Model(nn.Module):
    """A language model: a table and an output layer, maybe one weight."""

    def __init__(self, tied=False, bias=True):
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(CLASSES, WIDTH),
            nn.Linear(WIDTH, CLASSES, bias=bias and not tied),
        )
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))


def compare(call, size=2, tied=False, plan="head:column", dtype=D, bound=1e-13):
    """call(model, ids, target) -> something to differentiate, whole and split. Gives the elements that one rank moved, and its model."""
    torch.manual_seed(0)
    model = Model(tied).to(dtype)
    ids, target = torch.randint(0, CLASSES, (3, 5)), torch.randint(0, CLASSES, (3, 5))
    whole = copy.deepcopy(model)
    expected = call(whole, ids, target)
    expected.backward(torch.linspace(0.5, 2, expected.numel(), dtype=expected.dtype).view(expected.shape))

    def work(rank, group, everyone):
        mine, counted, reads = copy.deepcopy(model), Counted(group), Counted(everyone)
        shared = form.share(mine, counted, everyone, refuse, overrides=plan, reads=reads)
        counted.moved.clear()
        found = call(mine, ids, target)
        found.backward(torch.linspace(0.5, 2, found.numel(), dtype=found.dtype).view(found.shape))
        return found.detach(), mine, shared, counted.moved | reads.moved

    results = on_threads(size, work)
    for found, mine, shared, _ in results:
        torch.testing.assert_close(found, expected.detach(), rtol=bound, atol=bound, equal_nan=True)
        for (name, param), other in zip(mine.named_parameters(), whole.parameters(), strict=True):
            piece = shared.pieces.of(param)
            right = taken(other.grad, piece) if piece else other.grad
            torch.testing.assert_close(param.grad, right, rtol=bound, atol=bound, msg=name, equal_nan=True)
    return results[0][3], results[0][1]


def shifted(logits, target):
    return logits[:, :-1], target[:, 1:]


WAYS = {
    "flat": lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten()),
    "view": lambda m, x, y: F.cross_entropy(m(x).view(-1, CLASSES), y.view(-1)),
    "float": lambda m, x, y: F.cross_entropy(m(x).float().double().reshape(-1, CLASSES), y.reshape(-1)),
    "shifted": lambda m, x, y: F.cross_entropy(m(x)[:, :-1].reshape(-1, CLASSES), y[:, 1:].reshape(-1)),
    "shifted as Hugging Face": lambda m, x, y: F.cross_entropy(
        m(x)[..., :-1, :].contiguous().view(-1, CLASSES), y[..., 1:].contiguous().view(-1)
    ),
    "transposed": lambda m, x, y: F.cross_entropy(m(x).transpose(1, 2), y),
    "permuted": lambda m, x, y: F.cross_entropy(m(x).permute(0, 2, 1), y, reduction="none"),
    "one row": lambda m, x, y: F.cross_entropy(m(x)[0, 0], y[0, 0]),
    "last": lambda m, x, y: F.cross_entropy(m(x)[:, -1], y[:, -1]),
    "module": lambda m, x, y: nn.CrossEntropyLoss()(m(x).flatten(0, 1), y.flatten()),
    "sum": lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten(), reduction="sum"),
    "none": lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten(), reduction="none"),
    "ignored": lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten().index_fill(0, torch.tensor([1, 4]), -100)),
    "another ignored": lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten(), ignore_index=int(y[0, 0])),
    "all ignored": lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), torch.full((15,), -100)),
    "weighted": lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten(), torch.linspace(0.1, 2, CLASSES, dtype=D)),
    "smoothed": lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "everything": lambda m, x, y: F.cross_entropy(
        m(x).flatten(0, 1), y.flatten(), torch.linspace(0.1, 2, CLASSES, dtype=D), ignore_index=3, label_smoothing=0.2
    ),
    "everything, each": lambda m, x, y: F.cross_entropy(
        m(x).flatten(0, 1), y.flatten(), torch.linspace(0.1, 2, CLASSES, dtype=D), ignore_index=3, label_smoothing=0.2,
        reduction="none",
    ),
    "large numbers": lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1) * 1e4, y.flatten()),
    "capped": lambda m, x, y: F.cross_entropy((torch.tanh(m(x) / 3.0) * 3.0).flatten(0, 1), y.flatten()),
    "twice": lambda m, x, y: _twice(m(x).flatten(0, 1), y.flatten()),
}  # fmt: skip


def _twice(logits, y):
    return F.cross_entropy(logits, y) + F.cross_entropy(logits[1:], y[:-1], label_smoothing=0.1)


@pytest.mark.case("tensor: parallel cross-entropy")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_the_loss_is_torchs_and_logits_are_not_gathered(name, tied):
    plan = "embed:vocab" if tied else "head:column"
    moved, model = compare(
        WAYS[name], size=3 if tied else 2, tied=tied, plan=plan, bound=1e-6 if name == "float" else 1e-12
    )
    assert "all_gather" not in moved
    # rows, not rows × classes: the largest, three sums, and the gradient (and a table's rows) of WIDTH numbers
    assert moved["all_reduce"] <= 15 * (2 * 4 + 2 * WIDTH)
    assert vars(model.head)["forward"].uses.losses


@pytest.mark.case("tensor: logits that are read are gathered")
@pytest.mark.parametrize(
    "call",
    [
        lambda m, x, y: F.log_softmax(m(x), -1).flatten(0, 1)[torch.arange(15), y.flatten()].mean(),
        lambda m, x, y: F.nll_loss(F.log_softmax(m(x).flatten(0, 1), -1), y.flatten()),
        lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), F.one_hot(y.flatten(), CLASSES).to(D)),
        lambda m, x, y: m(x).logsumexp(-1).pow(2).mean() + F.cross_entropy(m(x).flatten(0, 1), y.flatten()),
        lambda m, x, y: (m(x) @ torch.ones(CLASSES, 2, dtype=D)).sum(),
        lambda m, x, y: _both(m(x), y),
        lambda m, x, y: F.cross_entropy(m(x)[x > 3], y[x > 3]),
        lambda m, x, y: F.cross_entropy(m(x)[..., :7].flatten(0, 1), y.flatten() % 7),
        lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1) + torch.arange(CLASSES, dtype=D), y.flatten()),
        lambda m, x, y: F.mse_loss(m(x).view(3, -1), torch.ones(3, 5 * CLASSES, dtype=D)),
        lambda m, x, y: _masked(m(x), y),
        lambda m, x, y: _written(m(x), y),
        lambda m, x, y: _own(m(x)),
        lambda m, x, y: torch.cat([m(x), m(x)]).pow(2).mean(),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [2, 3])
def test_whatever_else_reads_them_gets_them_whole(call, size):
    moved, _ = compare(call, size=size, bound=1e-12)
    assert moved["all_gather"]


def _both(logits, y):
    """A loss, and a part of another one from the same logits."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + logits.softmax(-1)[..., 2].sum()


def _masked(logits, y):
    logits = logits.clone()
    logits[..., 4] = -5.0
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def _written(logits, y):
    logits = logits * 1.0
    logits.clamp_(-0.1, 0.1)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3 * ctx.saved_tensors[0] ** 2


def _own(logits):
    return _Cube.apply(logits).mean()


@pytest.mark.case("tensor: logits that are read are gathered")
def test_gradients_of_logits_and_of_gradients():
    def hooked(m, x, y):
        logits, seen = m(x), []
        logits.retain_grad()
        logits.register_hook(seen.append)
        F.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
        assert torch.equal(logits.grad + 0, seen[0] + 0)
        m.zero_grad()
        return (F.cross_entropy(m(x).flatten(0, 1), y.flatten()) * (logits.grad + 0).abs().sum()).sum()

    def penalty(m, x, y):
        logits = m(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1)
        (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
        return loss + grad.pow(2).sum()

    compare(hooked, bound=1e-12)
    compare(penalty, bound=1e-12)


@pytest.mark.case("tensor: logits that are read are gathered")
def test_what_looks_at_memory_sees_the_whole():
    torch.manual_seed(0)
    model = Model().to(D)

    def work(rank, group, everyone):
        mine = copy.deepcopy(model)
        form.share(mine, group, everyone, refuse, overrides="head:column", reads=everyone)
        logits = mine(torch.tensor([[1, 2]]))
        assert isinstance(logits, DealtTensor)
        assert logits.shape == (1, 2, CLASSES)
        plain = [
            logits.detach().numpy(),
            logits.tolist(),
            str(logits),
            float(logits.detach()[0, 0, 3]),
            logits.argmax(-1),
        ]
        return [*plain, F.cross_entropy(logits[0], torch.tensor([1, 2]))]

    first, second = on_threads(2, work)
    whole = model(torch.tensor([[1, 2]])).detach()
    for found in (first, second):
        assert (torch.from_numpy(found[0]) - whole).abs().max() < 1e-14
        assert (torch.tensor(found[1], dtype=D) - whole).abs().max() < 1e-14
        assert found[2].startswith("tensor(")
        assert abs(found[3] - float(whole[0, 0, 3])) < 1e-14
        assert torch.equal(found[4], whole.argmax(-1))


@pytest.mark.case("tensor: logits that are read are gathered")
def test_ranks_that_read_different_outputs_are_told():
    def work(rank, group, everyone):
        mine = Model().to(D)
        form.share(mine, group, everyone, refuse, overrides="head:column", reads=everyone)
        outputs = [mine(torch.tensor([[1, 2]])) for _ in range(2)]
        return outputs[rank].argmax(-1)

    with pytest.raises(LoopError, match="read outputs of different forwards"):
        on_threads(2, work)


@pytest.mark.case("tensor: logits that are read are gathered")
def test_a_layer_that_is_no_output_layer_is_soon_gathered_at_once():
    def work(rank, group, everyone):
        mine = nn.Sequential(nn.Linear(4, 6), nn.Softmax(-1), nn.Linear(6, 3)).to(D)
        form.share(mine, group, everyone, refuse, overrides="0:column", reads=everyone)
        kinds = []
        mine[0].register_forward_hook(lambda m, args, out: kinds.append(type(out)))
        for _ in range(4):
            mine(torch.ones(2, 4, dtype=D)).sum().backward()
        return kinds

    for kinds in on_threads(2, work):
        assert kinds == [DealtTensor, DealtTensor, torch.Tensor, torch.Tensor]


@pytest.mark.case("tensor: logits that are read are gathered")
@pytest.mark.parametrize("whole", [True, False])
def test_a_write_that_others_cannot_follow_is_told(whole):
    def work(rank, group, everyone):
        mine = Model().to(D)
        form.share(mine, group, everyone, refuse, overrides="head:column", reads=everyone)
        logits = mine(torch.tensor([[1, 2]])) * 1.0
        flat = logits.view(-1, CLASSES)
        beside = logits.view(2, CLASSES)
        flat[:, 0] = 0.0
        return F.cross_entropy(logits.flatten(0, 1) if whole else beside, torch.tensor([1, 2]))

    with pytest.raises(StrategyError, match="written in place through another view"):
        on_threads(2, work)


def test_the_first_steps_self_check_sees_what_such_a_loss_divides_by():
    def seen(m, x, y):
        loss = F.cross_entropy(m(x).flatten(0, 1), y.flatten().index_fill(0, torch.tensor([1, 4]), -100))
        divisor = divisor_of(loss)
        assert divisor is not None
        assert (divisor.value, divisor.is_sum) == (13.0, False)
        total = divisor_of(F.cross_entropy(m(x).flatten(0, 1), y.flatten(), reduction="sum"))
        assert total is not None
        assert total.is_sum
        return loss

    compare(seen, bound=1e-12)


def test_a_target_that_is_no_class_is_refused_as_by_torch():
    for wrong in (CLASSES, -1):
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            compare(lambda m, x, y, wrong=wrong: F.cross_entropy(m(x)[:, 0], torch.tensor([1, wrong, 2])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fewer_bits(dtype):
    bound = 1e-5 if dtype is torch.float32 else 3e-2
    compare(lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten()), dtype=dtype, bound=bound)
