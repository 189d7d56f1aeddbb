"""What a forward keeps for its backward, read off its graph; and the most that the backward takes at once."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from echelon.mesh.unwinding import Operation, most
from echelon.parallel.kept import Backwards, Graph, graph

CPU = torch.device("cpu")


# -- the walk back: pure ---------------------------------------------------------------------------------------------


def chain(*keeps, passes=()):
    """Operations one after another, the last of a forward first, each giving 10 bytes to the next."""
    last = len(keeps) - 1
    return [
        Operation(order=last - i, gives=((i + 1, 0, 10),) if i < last else (), keeps=kept, passes=i in passes)
        for i, kept in enumerate(keeps)
    ]


BEGINS = [(0, 0, 10)]


@pytest.mark.parametrize(
    ("operations", "sizes", "wanted"),
    [
        (chain(("a",)), {"a": 100}, 110),  # what is kept, and the gradient that it begins with
        (chain(("a",), ("b",)), {"a": 100, "b": 7}, 127),  # the gradient that it was given, and the one that it makes
        (chain(("a",), ("b",), passes={0}), {"a": 100, "b": 7}, 117),  # in the same memory
        (chain((), ("a",)), {"a": 100}, 120),
        (chain(("a",), ("a",)), {"a": 100}, 120),  # counted once
        (chain((), ()), {}, 20),
    ],
)  # fmt: skip
def test_a_backward_takes_what_was_kept_and_gradients_on_their_way(operations, sizes, wanted):
    assert most(operations, sizes, BEGINS) == wanted


def test_what_was_kept_goes_once_the_last_operation_that_needs_it_is_over():
    wide = Operation(order=0, gives=((2, 0, 1000),), keeps=("b",))
    first = Operation(order=1, gives=((1, 0, 10),), keeps=("a",))
    operations = [first, wide, Operation(order=-1)]
    assert most(operations, {"a": 900, "b": 5}, BEGINS) == 5 + 10 + 1000
    operations[1] = Operation(order=0, gives=((2, 0, 1000),), keeps=("a", "b"))
    assert most(operations, {"a": 900, "b": 5}, BEGINS) == 905 + 10 + 1000


def test_two_gradients_of_one_value_are_added_up_in_place_where_nobody_else_reads_them():
    split = Operation(order=3, gives=((1, 0, 10), (2, 0, 10)))
    left, right = (Operation(order=order, gives=((3, 0, 10),)) for order in (2, 1))
    assert most([split, left, right, Operation(order=0)], {}, BEGINS) == 30
    # passed on, and added to: 10 as they came, 10 in which the sum is
    both = Operation(order=1, gives=((1, 0, 10), (1, 0, 10)), passes=True)
    assert most([both, Operation(order=0)], {}, BEGINS) == 20


# -- a graph -----------------------------------------------------------------------------------------------------------


def net():
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8))


def kept(loss, model=None):
    return graph([loss], CPU, () if model is None else (*model.parameters(), *model.buffers()))


def test_what_a_forward_keeps_is_counted_once_and_without_parameters():
    model, x = net(), torch.randn(32, 64)
    found = kept(model(x).sum(), model)
    hidden = 32 * 128 * 4
    assert (
        found.kept == x.nbytes + hidden + 4
    )  # the input, what tanh and the second layer both keep, the loss
    # and the gradients of what tanh gave and took, when the second layer's input and the first one's are still there
    assert found.kept + hidden < found.most <= found.kept + 2 * hidden + 32 * 8 * 4 + 128 * 64 * 4


def test_of_a_slice_of_the_data_the_slice_counts_and_of_an_expanded_tensor_its_memory():
    data = torch.randn(1000, 16)
    layer = nn.Linear(16, 4, bias=False)
    assert kept(layer(data[:10]).sum()).kept == 10 * 16 * 4 + 4
    row = torch.randn(1, 16)
    assert kept(layer(row.expand(500, 16)).sum()).kept <= row.nbytes + 500 * 16 * 4 + 4


def test_parts_of_one_result_count_together_no_more_than_it():
    layer, x = nn.Linear(16, 48, bias=False), torch.randn(10, 16)
    q, k, v = layer(x).chunk(3, dim=1)
    assert (
        kept((q * k * v).sum()).kept == x.nbytes + 10 * 48 * 4 + 10 * 16 * 4 + 4
    )  # the input, the result, q * k


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone())
        ctx.aside = x * 2
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_a_function_of_the_script_counts_with_what_it_put_aside():
    x = torch.randn(100, requires_grad=True)
    assert kept(Doubled.apply(x).sum()).kept == 2 * x.nbytes + 4


def trained(step):
    """Gradients of a model, with and without the look at its graph, and what was found."""
    grads, found = [], None
    for looks in (False, True):
        torch.manual_seed(0)
        model, x = net(), torch.randn(32, 64)
        graphs = Backwards(CPU)
        graphs.leave_out(model.parameters)
        if looks:
            graphs.begin()
        try:
            step(model, x)
        finally:
            graphs.end()
        grads.append([p.grad.clone() for p in model.parameters()])
        found = graphs.found.get(None, "nothing")
    assert all(map(torch.equal, *grads))
    return found


def test_a_checkpoint_that_computes_again_is_not_guessed():
    assert trained(lambda model, x: checkpoint(model, x, use_reentrant=False).sum().backward()) is None


def test_a_checkpoint_with_a_backward_in_the_backward_counts_on_top():
    def step(model, x):
        checkpoint(model, x.requires_grad_(), use_reentrant=True).sum().backward()

    found = trained(step)
    assert found.most > found.kept + 32 * 128 * 4


@pytest.mark.parametrize("packs", ["tensors", "files"])
def test_saved_tensors_under_hooks_of_the_script_are_counted_as_these_left_them_and_not_unpacked(packs):
    unpacked = []
    store = {}

    def pack(tensor):
        if packs == "tensors":
            return tensor.to(torch.float64)
        store[len(store)] = tensor
        return str(len(store) - 1)

    def unpack(packed):
        unpacked.append(packed)
        return packed.to(torch.float32) if packs == "tensors" else store[int(packed)]

    model, x = net(), torch.randn(32, 64)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = model(x).sum()
    found = kept(loss, model)
    assert unpacked == []
    assert (found is None) == (packs == "files")
    if found is not None:
        assert found.kept > 2 * (x.nbytes + 32 * 128 * 4)
    loss.backward()


def test_gradients_of_gradients_are_counted_and_right():
    def step(model, x):
        x.requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (grad.square().sum() + model(x).sum()).backward()

    assert trained(step).kept > 2 * 32 * 128 * 4


def test_transforms_that_allow_no_hooks_work():
    def step(model, x):
        inner = torch.func.grad(lambda y: model(y).sum())(x)
        (model(x).sum() + inner.sum()).backward()

    assert trained(step) is not None


@pytest.mark.slow
def test_a_compiled_model_is_compiled_once():
    compiled = []

    def backend(module, inputs):
        compiled.append(module)
        return module

    def step(model, x):
        made = torch.compile(model, backend=backend)
        for _ in range(2):
            made(x).sum().backward()

    assert trained(step).kept >= 32 * 128 * 4
    assert len(compiled) == 1  # with the look and without it
    torch.compiler.reset()


# -- the first step ----------------------------------------------------------------------------------------------------


@pytest.fixture
def graphs():
    made = Backwards(CPU)
    made.begin()
    yield made
    made.end()


def test_nothing_is_left_of_it_afterwards():
    before = torch.autograd.backward
    graphs = Backwards(CPU)
    graphs.begin()
    graphs.begin()
    assert torch.autograd.backward != before
    graphs.end()
    graphs.end()
    assert torch.autograd.backward is before
    net()(torch.randn(2, 64)).sum().backward()
    assert graphs.found == {}


def test_several_runs_look_once_each_and_one_that_is_dropped_no_more():
    before = torch.autograd.backward
    first, second, dropped = (Backwards(CPU) for _ in range(3))
    for graphs in (first, second, dropped):
        graphs.begin()
    ours = torch.autograd.backward
    del dropped, graphs
    gc.collect()
    first.label = second.label = "a"
    net()(torch.randn(8, 64)).sum().backward()
    assert first.found == second.found != {}
    second.end()
    assert torch.autograd.backward == ours
    first.end()
    assert torch.autograd.backward is before


def test_who_wrapped_it_meanwhile_stays_and_it_counts_no_more():
    before = torch.autograd.backward
    graphs, called = Backwards(CPU), []
    graphs.begin()
    ours = torch.autograd.backward

    def theirs(*args, **kwargs):
        called.append(args)
        return ours(*args, **kwargs)

    torch.autograd.backward = theirs
    graphs.end()
    model = net()
    model(torch.randn(2, 64)).sum().backward()
    assert called
    assert not graphs.found
    assert model[0].weight.grad is not None
    torch.autograd.backward = ours  # they put back what they had found
    graphs.begin()
    graphs.end()
    assert torch.autograd.backward is before


def test_the_largest_counts_of_each_label(graphs):
    model = net()
    for label, rows in (("a", 4), ("a", 16), ("a", 2), ("b", 8)):
        graphs.label = label
        model(torch.randn(rows, 64)).sum().backward()
    assert set(graphs.found) == {"a", "b"}
    assert graphs.found["a"].kept > graphs.found["b"].kept > 8 * 128 * 4
    graphs.label = "a"
    checkpoint(model, torch.randn(2, 64), use_reentrant=False).sum().backward()
    assert graphs.found["a"] is None


def test_an_output_counts_for_as_long_as_the_script_holds_it(graphs):
    def step(holds):
        output = nn.functional.relu(layer(x)) * 1.0  # kept by nobody: the sum needs only its shape
        graphs.gave({"logits": output})
        loss = output.sum()
        if not holds:
            del output
        graphs.label = holds
        loss.backward()

    layer, x = nn.Linear(16, 256), torch.randn(64, 16)
    step(False)
    gc.collect()
    step(True)
    assert graphs.found[True].kept - graphs.found[False].kept == 64 * 256 * 4


def test_an_output_that_does_not_let_itself_be_gone_through_is_no_error(graphs):
    class Strict(dict):
        def __init__(self, values):
            super().__init__(values)
            if None in values.values():
                raise ValueError("a field is missing")

    graphs.gave(Strict({"logits": torch.zeros(3)}))


def test_a_graph_that_cannot_be_read_is_no_error():
    class Odd:
        grad_fn = object()

    assert graph([Odd()], CPU) is None
    assert graph([torch.zeros(3, requires_grad=True)], CPU) == Graph(0, 0)
