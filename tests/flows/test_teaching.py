"""Loops that cannot give one process's answer: refused or warned about, with what to do instead."""

from __future__ import annotations

import pytest

from echelon.facts import UNEVEN
from tests.flows.test_users import HEAD, LOOP, facts, warnings


def flat(text):
    """Without the line breaks of a terminal of 80 columns."""
    return " ".join(text.split())


def test_a_worker_that_skips_an_iteration_is_told_both_batches(echelon_run):
    script = (
        HEAD
        + """
model, opt, loader = run.prepare(model, opt, DataLoader(TensorDataset(x, y), batch_size=4))
for i, (a, b) in enumerate(loader):
    loss = F.cross_entropy(model(a), b)
    if run.rank == 1 and i == 1:
        continue                                  # the guard against a bad loss, on one worker alone
    loss.backward(); opt.step(); opt.zero_grad()
"""
    )
    result = echelon_run(script)
    assert result.code == 1
    assert result.seconds < 30
    said = flat(result.err)
    assert "LoopError: the workers' gradients are of different batches" in said
    assert "worker 0 in its 2., worker 1 in its 3." in said
    assert "decide such things together, e.g. with run.reduce" in said


def test_a_loader_with_an_iter_of_its_own_is_refused(echelon_run):
    script = (
        HEAD
        + """
class Doubled(DataLoader):
    def __iter__(self):
        for a, b in super().__iter__():
            yield a * 2, b
loader = run.prepare(Doubled(TensorDataset(x, y), batch_size=4))
"""
    )
    result = echelon_run(script)
    assert result.code == 2
    said = flat(result.err)
    assert "Doubled has an __iter__ of its own" in said
    assert "Put that logic into the dataset, the sampler or collate_fn" in said


ZIPPED = (
    HEAD
    + """
first, second = DataLoader(TensorDataset(x, y), batch_size=8), DataLoader(TensorDataset(x, y), batch_size={size})
model, opt, first, second = run.prepare(model, opt, first, second)
for (a, b), (c, d) in zip(first, second):
    (F.cross_entropy(model(a), b) + F.cross_entropy(model(c), d)).backward(); opt.step(); opt.zero_grad()
"""
)


def test_zipped_loaders_that_are_cut_in_other_shares_warn(echelon_run):
    result = echelon_run(ZIPPED.format(size=5))
    assert result.code == 0, result.err
    said = [w for w in warnings(result) if "parts of different shares in one step" in w]
    assert said
    assert "Give both the same batch size, step once for each, or use run.mean" in flat(said[0])
    assert "different shares" in flat(result.err)


def test_zipped_loaders_of_one_batch_size_stay_quiet(echelon_run):
    result = echelon_run(ZIPPED.format(size=8))
    assert result.code == 0, result.err
    assert warnings(result) == []


def test_a_worker_without_a_backward_warns(echelon_run):
    script = (
        HEAD
        + """
model, opt, loader = run.prepare(model, opt, DataLoader(TensorDataset(x, y), batch_size=4))
for i, (a, b) in enumerate(loader):
    if run.rank == 0 or i != 1:
        F.cross_entropy(model(a), b).backward()
    opt.step(); opt.zero_grad()
"""
    )
    result = echelon_run(script)
    assert result.code == 0, result.err
    assert set(warnings(result)) == {UNEVEN}
    assert "use run.clip_grad_norm" in flat(result.err)


def test_run_mean_twice_in_a_micro_step_of_a_group_is_refused(echelon_run):
    script = (
        HEAD
        + """
model, opt, loader = run.prepare(model, opt, DataLoader(TensorDataset(x, y), batch_size=4))
for a, b in loader:
    each, keep = F.cross_entropy(model(a), b, reduction="none"), a[:, 0] > 0
    loss = run.mean(each[keep].sum(), keep.sum()) + run.mean(each[~keep].sum(), (~keep).sum())
    loss.backward(); opt.step(); opt.zero_grad()
"""
    )
    result = echelon_run(script, options=("--set", "accumulate=2"))
    assert result.code == 2
    said = flat(result.err)
    assert "run.mean was called twice in one micro-step of an accumulation group" in said
    assert "Put all of the loss into one total" in said
    assert echelon_run(script).code == 0, "without a group there is nothing to refuse"


@pytest.mark.parametrize(("last", "in_group"), [(2, True), (1, False)])
def test_leaving_a_loop_in_mid_group_warns(echelon_run, last, in_group):
    script = (
        HEAD
        + f"""
model, opt, loader = run.prepare(model, opt, DataLoader(TensorDataset(x, y), batch_size=4))
for epoch in range(2):
    for i, (a, b) in enumerate(loader):
        F.cross_entropy(model(a), b).backward(); opt.step(); opt.zero_grad()
        if i == {last}:
            break
print("steps", run.global_step)
"""
    )
    result = echelon_run(script, options=("--set", "accumulate=2"))
    assert result.code == 0, result.err
    assert "steps 2" in result.log(0)
    said = [w for w in warnings(result) if "left in the middle of an accumulation group" in w]
    assert bool(said) == in_group
    assert all("what the group held is dropped" in w for w in said)


@pytest.mark.parametrize(("inputs", "told"), [("F.dropout(a, 0.5)", True), ("a", False)])
def test_dropout_that_no_layer_announced_is_told_after_the_first_step(echelon_run, inputs, told):
    script = LOOP.replace("model(a)", f"model({inputs})")
    assert (script != LOOP) == told
    result = echelon_run(script)
    assert result.code == 0, result.err
    said = facts(result)
    assert any("the first step drew random numbers (F.dropout, noise)" in line for line in said) == told
    assert ("not the answer of one process:" in said) == told
