"""Pipelines as people meet them: what a script may call, what it is told, and what it leaves behind."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.flows.test_teaching import flat
from tests.flows.test_users import HEAD, LOOP

STEPS = (
    HEAD.replace(
        "opt = torch.optim.SGD(model.parameters(), lr=0.1)",
        "opt = torch.optim.Adam(model.parameters(), lr=0.01)",
    )
    + """
if len(sys.argv) > 2:
    run.resume(sys.argv[2])
model, opt, loader = run.prepare(model, opt, DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True))
for epoch in run.epochs(4):
    for a, b in loader:
        loss = run.step(F.cross_entropy, (a, b), clip_norm=0.5)
        run.log(loss=loss)
    if epoch == 1:
        run.checkpoint().wait()
with torch.no_grad():
    out = model(x)
found = run.evaluate(model, DataLoader(TensorDataset(x, y), batch_size=8), lambda m, b: {"loss": (F.cross_entropy(m(b[0]), b[1], reduction="sum"), len(b[0]))})
run.print(f"evaluated {found['loss']:.12f} called {F.cross_entropy(out, y).item():.12f}")
run.save(sys.argv[1])
"""
)


@pytest.mark.case("pipeline: a plain loop is told what to write")
def test_a_plain_loop_under_pipeline_is_told_what_to_write(echelon_run):
    result = echelon_run(LOOP, options=("--strategy", "pipeline=2"))
    assert result.code == 1
    said = flat(result.err)
    assert "under pipeline a model lies in stages on several workers" in said
    assert "Write loss = run.step(loss_fn, (inputs, target))" in said


def no_pickle(folder):
    (folder / "no").mkdir(exist_ok=True)
    (folder / "no" / "sitecustomize.py").write_text(
        "import pickle\n"
        "def refuse(*args, **kwargs): raise SystemExit('somebody unpickled')\n"
        "pickle.loads = pickle.load = refuse\n"
    )
    return {"PYTHONPATH": f"{folder / 'no'}:{ROOT}"}


def words(log):
    evaluated, _, called = flat(log).split("evaluated ")[1].split()[:3]
    return float(evaluated), float(called)


def difference(one, two):
    return max(float((one[k] - two[k]).abs().max()) for k in one)


@pytest.mark.case("pipeline: trained, evaluated, saved and resumed as anywhere")
def test_a_pipeline_is_trained_evaluated_saved_and_resumed_as_anywhere(echelon_run, tmp_path):
    env = no_pickle(tmp_path)

    def train(name, workers, strategy, *source):
        options = ("--strategy", strategy, "--run-dir", str(tmp_path / f"run-{name}"))
        result = echelon_run(
            STEPS, str(tmp_path / name), *source, workers=workers, options=options, env=env, timeout_s=120
        )
        assert result.code == 0, result.err
        assert "warning" not in result.err
        found = load_file(tmp_path / f"{name}.safetensors")
        assert not any(torch.isnan(t).any() for t in found.values())
        return found, words((tmp_path / f"run-{name}" / "logs" / "worker-0.log").read_text())

    one, said = train("one", 1, "allreduce")
    two, found = train("two", 2, "pipeline=2,microbatches=3")
    assert one.keys() == two.keys()
    assert difference(one, two) < 1e-12
    assert found == pytest.approx(said, abs=1e-10)
    assert found[0] == pytest.approx(found[1], abs=1e-12)
    # its checkpoint goes on without a pipeline, and one of a single worker goes on in a pipeline
    for name, source, workers, strategy in (
        ("whole", "two", 1, "allreduce"), ("cut", "one", 3, "pipeline=3,microbatches=2"),
    ):  # fmt: skip
        folder = max((tmp_path / f"run-{source}" / "checkpoints").iterdir())
        again, _ = train(name, workers, strategy, str(folder))
        assert difference(one, again) < 1e-12
