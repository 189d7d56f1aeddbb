"""Levels 2 and 3 in a pipeline: replicas that keep stretches of a stage's parameters compute what whole ones do."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from echelon.comm.group import Lost, Met
from echelon.comm.threads import Room
from echelon.parallel.pipeline.contract import MicroBatch
from echelon.parallel.pipeline.lending import Uses
from echelon.parallel.pipeline.plan import Plans
from echelon.parallel.pipeline.stage import ModelStage
from echelon.parallel.pipeline.trace import Records
from echelon.parallel.sharded.flat import Member, lay, step_bytes, stretch, units
from tests.runs import PartedMeeting
from tests.unit.test_pipeline_stage import CASES, cut_of, micros_of, run, whole

CPU = torch.device("cpu")
TINY = 200


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_units_follow_the_calls_and_never_part_one():
    small = Member(("f32",), 4)
    members = dict.fromkeys("abcdefg", small) | {
        "t": Member(("f32",), 4, alone=True),
        "h": Member(("f16",), 2),
    }
    calls = ["ab", "cd", "t", "eh", "a", "f"]
    assert units(calls, members, 8) == [["a", "b"], ["c", "d"], ["t"], ["e", "f"], ["h"], ["g"]]
    assert units(calls, members, 1) == [["a", "b"], ["c", "d"], ["t"], ["e"], ["h"], ["f"], ["g"]]
    assert units([], {}, 8) == []


@pytest.mark.parametrize("numel", [0, 1, 5, 6, 7])
def test_stretches_cover_everything_once(numel):
    found = [i for rank in range(3) for i in range(*stretch(numel, 3, rank))]
    assert found == list(range(numel))


def replica(group, model, plans, stages, *, level, defer, tied=frozenset()):
    uses = Uses({i: plans[i].names_of_calls for i in range(stages)}, tied)
    params = [p for p in model.parameters() if p.is_floating_point()]
    sync = PartedMeeting(lay(model, params, uses, TINY), group, CPU, keeps=level == 2, defers=defer)
    sync.begin(weight=0.5)
    return sync


def planned(model, micro, made):
    """Recorded by one thread: what is different in torch meanwhile is so for all."""
    records = Records(model)
    plans = Plans(model, records, records.of(micro.args, micro.kwargs), made)
    plans.of(micro)
    return plans


def trained(group, plans, micros, loss_fn, *, level, defer):
    """One rank: a step of all stages; what it keeps of each gradient, by name, and how many units were whole at a time."""
    model, made, first = plans.model, plans.cut, plans.of(micros[0])
    sync = replica(group, model, first, made.num_stages, level=level, defer=defer)
    stages = [ModelStage(model, plans, i, defer=defer, lent=sync.lent) for i in range(made.num_stages)]
    resident = sync.watch_units()
    with sync.step():
        losses = run(stages, micros, loss_fn)
    assert sync.num_whole == 0
    sync.finish()
    assert isinstance(sync.commit(1), Met)
    return losses, sync.grads, resident, sync


@pytest.mark.case("sharded: levels 2 and 3 in a pipeline")
@pytest.mark.parametrize(
    ("level", "defer", "stages"),
    [
        (3, False, 2),
        *(pytest.param(*way, marks=pytest.mark.slow) for way in ((2, False, 2), (3, True, 2), (3, False, 1))),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_stretches_of_two_replicas_are_the_gradients_of_the_whole_model(name, level, defer, stages):
    torch.manual_seed(0)
    case = CASES[name]()
    micros = micros_of(case)
    made = cut_of(case.model, micros[0], stages)
    reference = copy.deepcopy(case.model)
    expected = whole(reference, micros, case.loss_fn)
    plans = [planned(copy.deepcopy(case.model), micros[0], made) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        ranks = [
            pool.submit(trained, group, mine, micros, case.loss_fn, level=level, defer=defer)
            for group, mine in zip(Room(2).groups(), plans, strict=True)
        ]
        ranks = [rank.result(60) for rank in ranks]
    torch.testing.assert_close(ranks[0][0], expected, rtol=1e-12, atol=1e-12)
    for key, param in reference.named_parameters():
        if param.grad is None:
            assert all(grads[key] is None for _, grads, *_ in ranks), key
            continue
        joined = torch.full((param.numel(),), torch.nan, dtype=param.dtype)
        for _, grads, *_ in ranks:
            start, stop, grad = grads[key]
            joined[start:stop] = grad
        assert torch.allclose(joined.view(param.shape), param.grad, rtol=1e-12, atol=1e-12), key


@pytest.mark.case("sharded: levels 2 and 3 in a pipeline")
def test_at_level_3_a_unit_or_two_are_whole_at_a_time():
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(6, 6), nn.Tanh()))).double()
    micros = [MicroBatch((torch.randn(3, 6).double(),), {}, torch.zeros(3, 6).double(), 1.0)]
    made = cut_of(model, micros[0], 2)
    found = {}
    for level in (2, 3):
        plans = planned(copy.deepcopy(model), micros[0], made)
        (group,) = Room(1).groups()
        _, _, resident, _ = trained(group, plans, micros, nn.functional.mse_loss, level=level, defer=False)
        found[level] = (len(resident), max(resident))
    assert found[2][1] == 8  # all of them, gathered once
    assert found[3][1] <= 2


@pytest.mark.case("sharded: bytes a step, predicted")
@pytest.mark.parametrize("level", [2, 3])
def test_a_step_sends_what_was_predicted(level):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(6, 6), nn.Tanh()))).double()
    micros = [MicroBatch((torch.randn(3, 6).double(),), {}, torch.zeros(3, 6).double(), 1 / 3)] * 3
    made = cut_of(model, micros[0], 1)
    plans = [planned(copy.deepcopy(model), micros[0], made) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        ranks = [
            pool.submit(trained, group, mine, micros, nn.functional.mse_loss, level=level, defer=False)
            for group, mine in zip(Room(2).groups(), plans, strict=True)
        ]
        ranks = [rank.result(60) for rank in ranks]
    size = sum(p.nbytes for p in model.parameters())
    for _, _, _, sync in ranks:
        assert abs(sync.sent_bytes / step_bytes(size, 2, 1, 3, keeps=level == 2) - 1) < 0.05


@pytest.mark.case("sharded: levels 2 and 3 in a pipeline")
def test_a_lost_peer_is_told_at_the_commit_and_nothing_stays_open():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    micro = MicroBatch((torch.randn(3, 4).double(),), {}, torch.zeros(3, 2).double(), 1.0)
    made = cut_of(model, micro, 1)
    plans = planned(model, micro, made)
    group, other = Room(2).groups()
    sync = replica(group, model, plans.of(micro), 1, level=3, defer=False)
    stages = [ModelStage(model, plans, 0, lent=sync.lent)]
    other.abort("it was killed")
    with sync.step():
        run(stages, [micro], nn.functional.mse_loss)
    sync.finish()
    outcome = sync.commit(1)
    assert isinstance(outcome, Lost)
    assert "killed" in outcome.reason
    sync.forget()
    assert sync.only_parts_are_here
