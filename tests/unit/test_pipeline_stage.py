"""Stages run one after the other give the loss and the gradients of the whole model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.errors import StrategyError
from echelon.parallel.pipeline import cut
from echelon.parallel.pipeline.contract import MicroBatch, Port
from echelon.parallel.pipeline.cut import Cut, Wish
from echelon.parallel.pipeline.placing import Seat, keep
from echelon.parallel.pipeline.plan import Plans, outline
from echelon.parallel.pipeline.record import tensors_of
from echelon.parallel.pipeline.stage import ModelStage
from echelon.parallel.pipeline.trace import Records
from tests.pipeline_models import Case, Gpt, cases, next_token

CASES = cases()


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other on a busy machine take longer than the sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cut_of(model: nn.Module, micro: MicroBatch, stages: int) -> Cut:
    record = Records(model).of(micro.args, micro.kwargs)
    return cut.find(outline(record, [1000 + 1000 * bool(node.names) for node in record.nodes]), Wish(stages))


def together(model: nn.Module, micro: MicroBatch, made: Cut, defer: bool = False) -> list[ModelStage]:
    """All stages with the same model."""
    records = Records(model)
    plans = Plans(model, records, records.of(micro.args, micro.kwargs), made)
    return [ModelStage(model, plans, index, defer=defer) for index in range(made.num_stages)]


def staged(model: nn.Module, micro: MicroBatch, made: Cut, defer: bool = False) -> list[ModelStage]:
    """Every stage with a model of its own, which holds the parameters of that stage and has no numbers for the others."""
    stages = []
    for index in range(made.num_stages):
        own = copy.deepcopy(model)
        seat = Seat(frozenset({index}), {stage: [stage] for stage in range(made.num_stages)})
        keep(own, made.users, seat, {})
        records = Records(own)
        plans = Plans(own, records, records.of(micro.args, micro.kwargs), made)
        stages.append(ModelStage(own, plans, index, defer=defer))
    return stages


def gathered(stages: list[ModelStage], model: nn.Module) -> None:
    """Gradients and buffers of all stages, in one model; those of shared parameters are summed."""
    made = stages[0].plans.cut
    for stage in stages:
        mine = dict(stage.model.named_parameters())
        for name, parameter in model.named_parameters():
            grad = mine[name].grad
            if stage.index not in made.holders(name):
                assert grad is None, name
            elif grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        for name, buffer in model.named_buffers():
            if made.owners[name] == stage.index:
                buffer.copy_(dict(stage.model.named_buffers())[name])


def run(stages: list[ModelStage], micros: list[MicroBatch], loss_fn: Any) -> list[Tensor]:
    """All micro-batches forward through all stages, then back."""
    for stage in stages:
        stage.begin(micros, loss_fn)
    sent: dict[tuple[int, int], Tensor] = {}
    for micro in range(len(micros)):
        for stage in stages:
            taken = {port.value: sent[micro, port.value] for port in stage.takes(micro)}
            gave = stage.forward(micro, taken)
            assert {port.value for port in stage.gives(micro)} == set(gave)
            for port in stage.gives(micro):
                assert gave[port.value].shape == port.shape
                assert gave[port.value].dtype == port.dtype
                sent[micro, port.value] = gave[port.value].clone().contiguous()
    for micro in range(len(micros)):
        back: dict[Port, Tensor] = {}
        for stage in reversed(stages):
            grads = {port: back[port] for port in stage.gives(micro) if port.grad}
            got = stage.backward(micro, grads)
            assert set(got) == {port for port in stage.takes(micro) if port.grad}
            back.update(got)
            if stage.defer:
                stage.weights(micro)
            assert stage.held == len(micros) - 1 - micro
    return list(stages[-1].losses.values())


def whole(model: nn.Module, micros: list[MicroBatch], loss_fn: Any) -> list[Tensor]:
    losses = []
    for micro in micros:
        args, kwargs = copy.deepcopy((micro.args, dict(micro.kwargs)))
        loss = loss_fn(model(*args, **kwargs), micro.target)
        (loss * micro.weight).backward()
        losses.append(loss.detach())
    return losses


def same(model: nn.Module, reference: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
    kinds = [(model.named_parameters(), reference.parameters()), (model.named_buffers(), reference.buffers())]
    for mine, others in kinds:
        ours = {name: t.grad if isinstance(t, nn.Parameter) else t for name, t in mine}
        theirs = [t.grad if isinstance(t, nn.Parameter) else t for t in others]
        for (name, a), b in zip(ours.items(), theirs, strict=True):
            if b is not None:
                assert torch.allclose(a, b, rtol=1e-12, atol=1e-12), (name, (a - b).abs().max())


def micros_of(case: Case, weights: tuple[float, ...] = (0.25, 0.75)) -> list[MicroBatch]:
    return [MicroBatch(case.args, case.kwargs, case.target, weight) for weight in weights]


def check(
    case: Case, made: Cut, micros: list[MicroBatch], defer: bool = False, apart: bool = False
) -> list[ModelStage]:
    reference = copy.deepcopy(case.model)
    expected = whole(reference, micros, case.loss_fn)
    parts = (staged if apart else together)(case.model, micros[0], made, defer)
    before = copy.deepcopy(micros)
    losses = run(parts, micros, case.loss_fn)
    for micro, old in zip(micros, before, strict=True):
        assert all(a.equal(b) for a, b in zip(tensors_of(micro.args), tensors_of(old.args), strict=True))
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    if apart:
        gathered(parts, case.model)
    same(case.model, reference)
    return parts


@pytest.mark.case("pipeline: stages are the whole model")
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_stages_give_the_loss_and_gradients_of_the_whole_model(name, stages):
    torch.manual_seed(0)
    case = CASES[name]()
    micros = micros_of(case)
    made = cut_of(case.model, micros[0], stages)
    check(case, made, micros, defer=stages in (1, 4), apart=stages == 3)


@pytest.mark.parametrize("name", ["in place", "partly frozen", "own function", "two inputs", "tied"])
def test_a_model_may_be_cut_at_every_place_that_is_offered(name):
    torch.manual_seed(0)
    case = CASES[name]()
    records = Records(case.model)
    record = records.of(case.args, case.kwargs)
    places = cut.possible(outline(record))
    assert len(places) > 2
    reference, begun = copy.deepcopy(case.model), copy.deepcopy(case.model.state_dict())
    micros = micros_of(case, (1.0,))
    expected = whole(reference, micros, case.loss_fn)
    for place in places:
        plans = Plans(case.model, records, record, cut.assigned(outline(record), [0, place], ""))
        case.model.load_state_dict(begun)
        case.model.zero_grad()
        losses = run([ModelStage(case.model, plans, index) for index in range(2)], micros, case.loss_fn)
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
        same(case.model, reference)


@pytest.mark.case("pipeline: changing lengths")
def test_sequences_of_other_lengths_follow_the_first_cut():
    torch.manual_seed(0)
    model = Gpt().double()
    micros = [
        MicroBatch((torch.randint(17, (2, length)),), {}, torch.randint(17, (2, length)), 0.5)
        for length in (9, 5, 9)
    ]
    case = Case(model, (), {}, None, next_token)
    parts = check(case, cut_of(model, micros[0], 3), micros)
    assert len(parts[0].plans.records._kept) == 2


def test_hooks_of_parameters_run_once_a_micro_batch_also_when_weights_are_put_off():
    case = CASES["gpt"]()
    micros = micros_of(case)
    seen: list[str] = []
    for defer in (False, True):
        seen.clear()
        parts = staged(case.model, micros[0], cut_of(case.model, micros[0], 2), defer)
        for stage in parts:
            for name, parameter in stage.model.named_parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda _, name=name, stage=stage: seen.append(f"{stage.index} {name}")
                )
        run(parts, micros, case.loss_fn)
        made = parts[0].plans.cut
        expected = [f"{s} {name}" for name, _ in case.model.named_parameters() for s in made.holders(name)]
        assert sorted(seen) == sorted(2 * expected)


def test_put_off_weights_have_no_gradient_until_they_are_asked_for():
    case = CASES["mlp"]()
    micros = micros_of(case, (1.0,))
    (stage,) = staged(case.model, micros[0], cut_of(case.model, micros[0], 1), defer=True)
    stage.begin(micros, case.loss_fn)
    stage.forward(0, {})
    stage.backward(0, {})
    assert all(p.grad is None for p in stage.model.parameters())
    stage.weights(0)
    assert all(p.grad is not None for p in stage.model.parameters())
    assert stage.held == 0


def test_what_follows_from_inputs_alone_is_not_sent():
    case = CASES["gpt"]()
    micros = micros_of(case)
    for stage in staged(case.model, micros[0], cut_of(case.model, micros[0], 4)):
        stage.begin(micros, case.loss_fn)
        for port in (*stage.takes(0), *stage.gives(0)):
            assert port.dtype == torch.float64
            assert port.grad


def test_a_stage_that_trains_nothing_gets_no_gradient_back():
    case = CASES["partly frozen"]()
    micros = micros_of(case)
    record = Records(case.model).of(case.args, case.kwargs)
    made = cut.by_names(outline(record), "body.1", 2)
    first = staged(case.model, micros[0], made)[0]
    first.begin(micros, case.loss_fn)
    assert [port.grad for port in first.gives(0)] == [False]
    check(case, made, micros)


def test_a_lost_step_is_forgotten():
    case = CASES["mlp"]()
    micros = micros_of(case)
    made = cut_of(case.model, micros[0], 2)
    first, _ = parts = staged(case.model, micros[0], made)
    first.begin(micros, case.loss_fn)
    first.forward(0, {})
    assert first.held == 1
    first.drop()
    assert first.held == 0
    run(parts, micros, case.loss_fn)


def test_autocast_of_a_module_is_kept_and_gives_the_same_bits():
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = torch.relu(self.b(torch.relu(self.a(x))))
            return self.c(x.float())

    torch.manual_seed(0)
    model = Half()
    reference = copy.deepcopy(model)
    micros = [MicroBatch((torch.randn(8, 4),), {}, torch.randint(2, (8,)), 1.0)]
    losses = whole(reference, micros, F.cross_entropy)
    for defer in (False, True):
        parts = staged(model, micros[0], cut_of(model, micros[0], 3), defer)
        assert run(parts, micros, F.cross_entropy)[0].equal(losses[0])
        assert torch.bfloat16 in {port.dtype for stage in parts for port in stage.plan(0).gives}
        for stage in parts:
            for (name, ours), theirs in zip(
                stage.model.named_parameters(), reference.parameters(), strict=True
            ):
                assert ours.grad is None or torch.allclose(ours.grad, theirs.grad, rtol=1e-2, atol=1e-4), name


def test_forward_without_gradients_keeps_nothing():
    case = CASES["resnet"]()
    micros = micros_of(case)
    parts = staged(case.model, micros[0], cut_of(case.model, micros[0], 2))
    case.model.eval()
    expected = case.loss_fn(case.model(*case.args), case.target)
    sent: dict[int, Tensor] = {}
    with torch.no_grad():
        for stage in parts:
            stage.model.eval()
            stage.begin(micros, case.loss_fn)
            sent.update(stage.forward(0, {port.value: sent[port.value] for port in stage.takes(0)}))
            assert stage.held == 0
    torch.testing.assert_close(parts[-1].losses[0], expected.detach(), rtol=1e-12, atol=1e-12)


def test_a_cut_found_in_evaluation_that_training_cannot_keep_is_refused():
    """A BatchNorm that is called twice is only read in evaluation, and may be in two stages; training writes into it."""
    case = CASES["tied"]()
    micro = micros_of(case)[0]
    records = Records(case.model.eval())
    record = records.of(case.args, case.kwargs)
    uses = [at for at, node in enumerate(record.nodes) if node.label == "norm"]
    made = cut.assigned(outline(record), [0, uses[1]], "")
    plans = Plans(case.model, records, record, made)
    assert len(plans.of(micro)) == 2
    case.model.train()
    with pytest.raises(StrategyError, match="cannot be cut at `norm`"):
        plans.of(micro)
