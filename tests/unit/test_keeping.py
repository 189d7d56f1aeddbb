"""Checkpoints in a world of one: when they are taken, and what is said when one cannot be gone on from."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon.clock import Deadline
from echelon.errors import CheckpointError, LoopError, UsageError
from echelon.events import CheckpointSaved, Resumed, Warned
from tests.runs import come_to_the_end, finish_saving, run_of_one

DATA = TensorDataset(torch.arange(12.0).view(12, 1), torch.arange(12.0).view(12, 1))


@pytest.fixture
def make(tmp_path):
    """make(**fields) -> (run, events): a run of one, always in the same folder."""

    def made(**fields):
        events = []
        return run_of_one(tmp_path / "it", events, **fields), events

    return made


def model_of(width=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, width), nn.Linear(width, 1))


def train(run, model=None, epochs=2, body=lambda step: None, after=lambda: None):
    model = model or model_of()
    model, opt, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), 0.001, momentum=0.9), DataLoader(DATA, batch_size=3)
    )
    for _ in run.epochs(epochs):
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            body(run.global_step)
        after()
    finish_saving(run)
    return model


def steps(events):
    return [event.step for event in events if isinstance(event, CheckpointSaved)]


def test_checkpoint_every_saves_each_so_many_steps_and_keeps_the_last(make, tmp_path):
    run, events = make(checkpoint_every=3, keep=2)
    train(run)
    assert steps(events) == [3, 6]
    assert sorted(p.name for p in (tmp_path / "it" / "checkpoints").iterdir()) == [
        "step-00000003",
        "step-00000006",
    ]


def test_a_checkpoint_asked_for_in_a_loop_is_taken_at_the_end_of_the_iteration(make):
    run, events = make()
    handles = []

    def body(step):
        if step == 2:
            handles.append(run.checkpoint())
            assert handles[0].state == "waiting"

    train(run, body=body)
    assert (handles[0].step, handles[0].state) == (2, "complete")
    assert steps(events) == [2]


def test_waiting_for_it_takes_it_at_once(make):
    run, _ = make()
    states = []
    train(
        run,
        body=lambda step: (
            states.append(run.checkpoint().wait(Deadline.after(20)).state) if step == 2 else None
        ),
    )
    assert states == ["complete"]
    again, events = make()
    assert again.resume() == 2
    train(again)
    assert again.global_step == 8
    assert [event.step for event in events if isinstance(event, Resumed)] == [2]


def test_outside_of_loops_it_is_taken_where_it_stands(make):
    run, _ = make()
    train(run, epochs=1, after=lambda: run.checkpoint())
    again, events = make()
    again.resume()
    calm, _ = make()
    assert torch.equal(train(again, epochs=2)[0].weight, train(calm, epochs=2)[0].weight)
    assert len([e for e in events if isinstance(e, Resumed)]) == 1


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(make, tmp_path):
    run, _ = make()
    assert run.resume() is None
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        make()[0].resume(tmp_path / "nowhere")


@pytest.mark.case("another model is named by its tensor")
@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: model_of(5), r"0\.(weight|bias).*\(4.*\(5"),
        (lambda: nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1)), r"no tensor `2\.(weight|bias)`"),
        (lambda: nn.Sequential(nn.Linear(1, 4)), r"holds `1\.bias` and 1 more"),
        (lambda: model_of().double(), "float32 in .*float64 here"),
    ],
)
def test_another_model_is_told_which_tensor_does_not_fit(make, other, words):
    run, _ = make(checkpoint_every=2)
    train(run)
    again, _ = make()
    again.resume()
    with pytest.raises(CheckpointError, match=words):
        train(again, other())


def test_a_truncated_file_names_the_folder_and_what_is_wrong(make, tmp_path):
    run, _ = make(checkpoint_every=4, keep=1)
    train(run)
    shard = next((tmp_path / "it" / "checkpoints" / "step-00000008").glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="truncated"):
        make()[0].resume(tmp_path / "it" / "checkpoints" / "step-00000008")


@pytest.mark.case("the last complete one loads and says so")
def test_an_incomplete_one_is_passed_over_and_said(make, tmp_path):
    run, _ = make(checkpoint_every=4)
    train(run)
    (tmp_path / "it" / "checkpoints" / "step-00000008" / "manifest.json").unlink()
    again, events = make()
    assert again.resume() == 4
    said = [event.message for event in events if isinstance(event, Warned)]
    assert said == ["step-00000008 is incomplete: no manifest; going on from step 4"]


def test_a_pickle_is_refused(make, tmp_path):
    torch.save(model_of().state_dict(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="pickle"):
        make()[0].resume(tmp_path / "model.pt")


@pytest.mark.case("a script that goes another way")
def test_a_script_that_goes_another_way_is_told_where(make):
    run, _ = make()
    train(run, after=lambda: (run.reduce(1.0), run.checkpoint()))
    again, _ = make()
    again.resume()
    with pytest.raises(LoopError, match="here is gather, and there came reduce"):
        train(again, after=lambda: again.gather(torch.zeros(1)))


def test_a_place_that_is_never_reached_is_named(make):
    run, _ = make(checkpoint_every=7)
    train(run)
    again, _ = make()
    again.resume()
    with pytest.raises(LoopError, match=r"epoch 1 > loop 0 epoch 1, batch 3 \(step 7\)"):
        come_to_the_end(again)


def test_resume_comes_before_the_first_loop(make):
    run, _ = make(checkpoint_every=2)
    with pytest.raises(LoopError, match="after the script had begun"):
        train(run, after=lambda: run.resume())


def test_resume_twice_from_two_places_is_refused(make):
    run, _ = make(checkpoint_every=2)
    train(run)
    again, _ = make()
    again.resume()
    with pytest.raises(UsageError, match="resumed already, at step 8"):
        again.resume("elsewhere")


def test_what_a_tracked_object_holds_must_be_plain(make):
    class Odd:
        def state_dict(self):
            return {"inner": [object()]}

        def load_state_dict(self, state):
            pass

    run, _ = make(checkpoint_every=2)
    run.track(Odd())
    with pytest.raises(CheckpointError, match=r"tracked.*object"):
        train(run)
