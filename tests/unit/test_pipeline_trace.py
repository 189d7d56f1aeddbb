"""Recording a forward: what it says of a model, what it refuses, and that it leaves no trace."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.clock import Deadline
from echelon.errors import StrategyError, UsageError
from echelon.parallel.pipeline import cut, trace
from echelon.parallel.pipeline.measure import measure
from echelon.parallel.pipeline.plan import outline, plans
from echelon.parallel.pipeline.record import Leaf, Record
from echelon.parallel.pipeline.trace import Records, record
from tests.pipeline_models import Gpt, ResNet, cases, mlp


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other on a busy machine take longer than the sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def labels(made: Record) -> list[str]:
    return [node.label for node in made.nodes]


class Plain(nn.Module):
    """A forward that is given as a function."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.a, self.inner.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.fn = forward

    def forward(self, *args, **kwargs):
        return self.fn(self.inner, *args, **kwargs)


def test_modules_of_torch_are_one_node_each_and_functions_too():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.w = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (F.relu(self.a(x)) * self.w).sum(-1)

    made = record(Net(), (torch.randn(2, 4),), {})
    assert labels(made) == ["a", "model: relu", "model: mul", "model: sum"]
    assert [node.names for node in made.nodes] == [("a.weight", "a.bias"), (), ("w",), ()]
    assert made.nodes[0].call == Leaf("a")
    assert "test_pipeline_trace.py" in made.nodes[1].where


def _item(m: nn.Module, x: Tensor) -> Tensor:
    return x * x.sum().item()


def _branch(m: nn.Module, x: Tensor) -> Tensor:
    return m.a(x) if x.sum() > 0 else m.b(x)


def _masked(m: nn.Module, x: Tensor) -> Tensor:
    return m.a(x)[x > 0]


def _numpy(m: nn.Module, x: Tensor) -> Tensor:
    return x * float(m.a(x).detach().numpy().sum())


def _gradient(m: nn.Module, x: Tensor) -> Tensor:
    y = m.a(x)
    return torch.autograd.grad(y.sum(), m.a.weight)[0]


@pytest.mark.case("pipeline: control flow over numbers is refused")
@pytest.mark.parametrize("forward", [_item, _branch, _masked, _numpy, _gradient])
def test_control_flow_over_numbers_is_refused_with_module_line_and_what_to_do(forward):
    outer = nn.Sequential(nn.Linear(4, 4), Plain(forward))
    with pytest.raises(UsageError) as error:
        record(outer, (torch.randn(2, 4),), {})
    said = str(error.value)
    line = forward.__code__.co_firstlineno
    assert "the forward of `1` " in said
    assert any(f"test_pipeline_trace.py:{line + n}" in said for n in (1, 2))
    assert "torch.where" in said
    assert "sharded" in said


def test_control_flow_over_shapes_modes_and_plain_numbers_makes_other_records():
    def forward(m: nn.Module, x: Tensor, times: int = 1) -> Tensor:
        for _ in range(times):
            x = m.a(x)
        return m.b(x) if len(x) > 2 or m.training else x

    model = Plain(forward)
    records = Records(model)
    assert len(records.of((torch.randn(2, 4),), {}).nodes) == 2
    assert len(records.of((torch.randn(2, 4),), {"times": 3}).nodes) == 4
    model.eval()
    assert len(records.of((torch.randn(2, 4),), {}).nodes) == 1
    assert len(records.of((torch.randn(3, 4),), {}).nodes) == 2
    assert records.of((torch.randn(3, 4),), {}) is records.of((torch.ones(3, 4),), {})
    for size in range(3, 3 + 2 * trace.KEPT):
        records.of((torch.randn(size, 4),), {})
    assert len(records._kept) == trace.KEPT


def test_recording_leaves_the_model_as_it_was():
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls, self.last = ResNet(), 0, None

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = self.net(x)
            return self.last

    model = Remembers()
    objects = {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    record(model, (torch.randn(2, 3, 8, 8, generator=torch.Generator()),), {})
    assert torch.rand(1) == expected
    assert objects == {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    assert all(before[name].equal(value) for name, value in model.state_dict().items())
    assert (model.calls, model.last) == (0, None)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_what_follows_from_inputs_alone_is_marked_free_but_random_numbers_are_not():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        mask = torch.ones(4, 4).tril_()
        mask[0] = 0
        noise = torch.rand(4)
        return m.a(x.neg() * mask.sum(0)) + noise

    made = record(Plain(forward), (torch.randn(2, 4),), {})
    free = {node.label.split(": ")[-1]: node.free for node in made.nodes}
    assert free == {"ones": True, "tril_": True, "__setitem__": True, "rand": False, "neg": True, "sum": True,
                    "mul": True, "inner.a": False, "add": False}  # fmt: skip


def test_writing_into_a_part_of_what_is_used_later_pins_both_together():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = m.a(x)
        head = x[:, 0]
        y = m.b(x.detach())
        head.mul_(2)
        return m.b(x + y)

    made = record(Plain(forward), (torch.randn(2, 4),), {})
    assert labels(made)[0] == "inner.a"
    at = next(i for i, label in enumerate(labels(made)) if label.endswith("mul_"))
    assert (0, at) in made.pins
    assert min(cut.possible(outline(made))) > at


def test_a_norm_that_is_used_twice_stays_in_one_stage():
    made = record(*_case("tied"))
    uses = [at for at, node in enumerate(made.nodes) if node.label == "norm"]
    assert (uses[0], uses[1]) in made.pins
    assert not [place for place in cut.possible(outline(made)) if uses[0] < place <= uses[1]]


def _case(name: str):
    case = cases()[name]()
    return case.model, case.args, case.kwargs


def test_modules_outside_of_the_recording_thread_are_not_seen():
    """While one thread records, another one's model runs as ever."""
    other, seen = mlp(), []
    inside = threading.Event()
    done = threading.Event()

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        inside.set()
        assert done.wait(20)
        return m.a(x)

    def work() -> None:
        assert inside.wait(20)
        seen.append(other(torch.ones(1, 6)))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    made = record(Plain(forward), (torch.randn(2, 4),), {})
    thread.join(20)
    assert labels(made) == ["inner.a"]
    assert type(seen[0]) is Tensor


def test_how_parameters_lie_in_memory_changes_no_number_of_a_value():
    """One rank has a filter in another order, which makes its outputs lie so; the others have a placeholder."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).contiguous().view(-1, 4, 6, 6)).contiguous()

    mine, other = Net().to(memory_format=torch.channels_last), Net()
    x = torch.randn(2, 2, 8, 8)
    one, two = record(mine, (x,), {}), record(other, (x,), {})
    assert one.values[one.nodes[0].outs[0]].stride != two.values[two.nodes[0].outs[0]].stride
    assert one.shape_of_calls() == two.shape_of_calls()
    assert [node.outs for node in one.nodes] == [node.outs for node in two.nodes]


def test_a_model_whose_layers_come_in_another_order_is_refused_in_words():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.b(m.a(x)) if len(x) > 2 else m.a(m.b(x))

    model = Plain(forward)
    first = outline(record(model, (torch.randn(3, 4),), {}))
    made = cut.by_names(first, "inner.b", 2)
    other = outline(record(model, (torch.randn(2, 4),), {}))
    with pytest.raises(StrategyError, match=r"`inner.a` in stage 1, but its parameters are in stage 0"):
        cut.follow(other, made)


@pytest.mark.case("pipeline: layers are measured")
def test_measuring_tells_large_layers_from_small_ones_and_changes_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.Linear(64, 4096),
        nn.Linear(4096, 64),
        nn.Dropout(),
        nn.Linear(64, 4),
    )
    calls: list[int] = []
    model[2].weight.register_hook(lambda grad: calls.append(1))
    model[3].weight.data = torch.full((), float("nan")).expand(64, 4096)
    x, y = torch.randn(64, 64), torch.randint(4, (64,))
    made = record(model, (x,), {})
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    costs = measure(model, made, (x,), {}, Deadline.after(20), (F.cross_entropy, y))
    assert costs.measured == len(made.nodes) == 6
    assert min(costs.nodes[2], costs.nodes[3]) > max(costs.nodes[0], costs.nodes[5])
    assert costs.loss > 0
    assert all(type(ns) is int and ns % 100 == 0 for ns in costs.nodes)
    assert state.equal(torch.get_rng_state())
    assert not calls
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(before[name]))


def test_what_there_is_no_time_to_measure_is_estimated():
    model = Gpt()
    ids = torch.randint(17, (2, 8))
    made = record(model, (ids,), {})
    costs = measure(model, made, (ids,), {}, Deadline.after(0))
    assert costs.measured == 0
    by = dict(zip(labels(made), costs.nodes, strict=True))
    assert by["blocks.0.up"] > by["blocks.0.out"]
    assert all(bool(ns) != node.free for ns, node in zip(costs.nodes, made.nodes, strict=True))


def test_every_model_can_be_measured():
    for name in ("in place", "partly frozen", "two inputs", "gpt computed again", "encoder"):
        model, args, kwargs = _case(name)
        made = record(model, args, kwargs)
        costs = measure(model, made, args, kwargs, Deadline.after(60))
        real = [node for node in made.nodes if not node.free]
        assert costs.measured >= len(real) - 2, name


def test_ports_are_the_same_on_ranks_that_hold_different_parameters():
    torch.manual_seed(0)
    model = Gpt()
    ids = torch.randint(17, (2, 8))
    empty = copy.deepcopy(model)
    for parameter in empty.parameters():
        parameter.data = torch.full((), float("nan")).expand(parameter.shape)
    one, two = record(model, (ids,), {}), record(empty, (ids,), {})
    made = cut.find(outline(one, [1000] * len(one.nodes)), cut.Wish(3))
    assert [(p.takes, p.gives) for p in plans(one, made)] == [(p.takes, p.gives) for p in plans(two, made)]
    assert one.shape_of_calls() == two.shape_of_calls()


def test_compiled_modules_are_recorded_as_they_are_written():
    body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Sequential(torch.compile(body, backend="eager"), nn.Linear(4, 2))
    made = record(model, (torch.randn(2, 4),), {})
    assert labels(made) == ["0._orig_mod.0", "0._orig_mod.1", "1"]


def test_a_split_layer_is_recorded_with_its_collectives_inside():
    """Tensor parallel: parameters are DTensors, and hooks of modules gather and sum. Nothing is sent while recording."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = mlp(width=6, depth=1)
        parallelize_module(
            model, init_device_mesh("cpu", (2,)), {"2": ColwiseParallel(), "4": RowwiseParallel()}
        )
        made = record(model, (torch.randn(3, 6),), {})
        assert labels(made) == ["0", "1", "2", "3", "4"]
        assert made.values[made.nodes[2].outs[0]].shape == (3, 3)
        assert made.sizes["2.weight"] == 4 * 6 * 6 // 2
        costs = measure(model, made, (torch.randn(3, 6),), {}, Deadline.after(20))
        assert costs.measured == 3
    finally:
        dist.destroy_process_group()
