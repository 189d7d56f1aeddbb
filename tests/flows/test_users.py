"""What users suffer from elsewhere, done for real here: one test a line of the list, with real processes."""

from __future__ import annotations

import json

import pytest

HEAD = """
import os, sys, time, torch, torch.nn.functional as F, echelon
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
run = echelon.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
g = torch.Generator().manual_seed(1)
x, y = torch.randn(21, 6, generator=g, dtype=torch.float64), torch.randint(0, 4, (21,), generator=g)
"""

LOOP = (
    HEAD
    + """
model, opt, loader = run.prepare(model, opt, DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True))
for epoch in run.epochs(2):
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        loss.backward(); opt.step(); opt.zero_grad(); run.log(loss=loss)
"""
)


def facts(result):
    return [line for e in result.events if e["event"] == "Facts" for line in e["lines"]]


def warnings(result):
    return [e["message"] for e in result.events if e["event"] == "Warned"]


@pytest.mark.case("USERS 2")
@pytest.mark.case("first lines")
def test_the_first_lines_state_what_makes_a_step(echelon_run):
    result = echelon_run(LOOP, workers=2, options=("--set", "accumulate=2"))
    assert result.code == 0
    said = " ".join(facts(result))
    assert "global batch 16 samples a step" in said
    assert "4 a worker" in said
    assert "accumulate 2: the step's batch is 2 × 8" in said
    assert "not scaled" in said
    assert "same answer as one process" in said
    assert said.split("·")[0] in result.err.replace("\n", " ")


@pytest.mark.case("USERS 2")
@pytest.mark.case("biased mean warns")
def test_a_per_worker_mean_over_unequal_counts_warns_at_step_1_with_its_factor(echelon_run):
    script = (
        HEAD
        + """
y[1:11] = -100                                    # most targets of the first worker's part are ignored
model, opt, loader = run.prepare(model, opt, DataLoader(TensorDataset(x, y), batch_size=20))
for a, b in loader:
    F.cross_entropy(model(a), b).backward(); opt.step(); opt.zero_grad()
"""
    )
    result = echelon_run(script)
    (said,) = warnings(result)
    assert "5×" in said  # worker 0 divides by 1 and worker 1 by 9 or 10 valid targets
    assert "run.mean(total, count)" in said
    assert "run.mean" in result.err


@pytest.mark.case("biased division warns")
def test_a_division_by_a_count_out_of_proportion_warns(echelon_run):
    script = (
        HEAD
        + """
mask = torch.zeros(21, dtype=torch.float64); mask[8:] = 1.0; mask[0] = 1.0
model, opt, loader = run.prepare(model, opt, DataLoader(TensorDataset(x, y, mask), batch_size=20))
for a, b, m in loader:
    each = F.cross_entropy(model(a), b, reduction="none")
    ((each * m).sum() / m.sum()).backward(); opt.step(); opt.zero_grad()
"""
    )
    (said,) = warnings(echelon_run(script))
    assert "not in proportion" in said


@pytest.mark.case("biased mean quiet")
@pytest.mark.parametrize("loss", ["F.cross_entropy(model(a), b)", "(model(a) ** 2).mean()", "F.mse_loss(model(a), a[:, :4])",
                                  "((model(a) ** 2).sum() / a.shape[0])", "run.mean(F.cross_entropy(model(a), b, reduction='sum'), len(b))"])  # fmt: skip
def test_a_loss_in_proportion_stays_quiet(echelon_run, loss):
    script = (
        HEAD
        + f"""
model, opt, loader = run.prepare(model, opt, DataLoader(TensorDataset(x, y), batch_size=7))
for a, b in loader:
    ({loss}).backward(); opt.step(); opt.zero_grad()
"""
    )
    result = echelon_run(script)
    assert result.code == 0, result.err
    assert warnings(result) == []


@pytest.mark.case("run.step checks halves")
def test_run_step_names_a_loss_that_is_not_a_mean(echelon_run):
    script = (
        HEAD
        + """
model, opt, loader = run.prepare(model, opt, DataLoader(TensorDataset(x, y), batch_size=8))
for batch in loader:
    run.step(lambda out, y: torch.logsumexp((out @ out.T).flatten(), 0), batch)
"""
    )
    said = warnings(echelon_run(script))
    assert len(said) >= 1
    assert "weighted mean of its two halves" in said[0]


@pytest.mark.case("sharded stream")
@pytest.mark.case("USERS 7")
def test_uneven_inputs_end_together_and_every_sample_counts_once(echelon_run):
    """Shards of 10, 7 and 0 batches: nobody hangs, and the weights are those of one process over all samples."""
    script = (
        HEAD
        + """
from tests.runs import samples_of_the_last_loop
from torch.utils.data import IterableDataset
class Shards(IterableDataset):
    counts = (10, 7, 1)
    def shard(self, index, count):
        other = Shards(); other.mine = range(sum(self.counts[:index]), sum(self.counts[:index + 1])); return other
    def __iter__(self):
        return iter([(x[i], y[i]) for i in self.mine])
model, opt, loader = run.prepare(model, opt, DataLoader(Shards(), batch_size=3))
steps = 0
for a, b in loader:
    F.cross_entropy(model(a), b).backward(); opt.step(); opt.zero_grad(); steps += 1
print("steps", steps, "samples", samples_of_the_last_loop(run), "sum", float(sum(p.sum() for p in model.parameters())))
"""
    )
    result = echelon_run(script, workers=3)
    assert result.code == 0, result.err
    logs = [result.log(r) for r in range(3)]
    assert [int(log.split("samples ")[1].split()[0]) for log in logs] == [10, 7, 1]
    assert len({log.split("steps ")[1].split()[0] for log in logs}) == 1
    assert len({log.split("sum ")[1].split()[0] for log in logs}) == 1


@pytest.mark.case("USERS 13")
def test_unused_parameters_are_left_alone_without_a_flag_and_named_by_strict(echelon_run):
    script = (
        HEAD
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.never, self.aside = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 4)
    def forward(self, x):
        self.aside(x)
        return self.body(x)
model = Net().double()
opt = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
before = model.never.weight.clone()
model, opt, loader = run.prepare(model, opt, DataLoader(TensorDataset(x, y), batch_size=8))
for a, b in loader:
    F.cross_entropy(model(a), b).backward(); opt.step(); opt.zero_grad()
print("kept", torch.equal(model.never.weight, before))
"""
    )
    calm = echelon_run(script)
    assert calm.code == 0
    assert "kept True" in calm.log(0)
    strict = echelon_run(script, options=("--set", "strict=true"))
    assert strict.code == 1
    assert "not in forward: never.weight, never.bias" in strict.err
    assert "in forward, but not in the loss: aside.weight, aside.bias" in strict.err
    assert "rank" in strict.err


@pytest.mark.case("USERS 18")
def test_21_samples_on_4_workers_count_as_21(echelon_run):
    script = (
        HEAD
        + """
loader = DataLoader(TensorDataset(x, y), batch_size=8)
def count(model, batch):
    a, b = batch
    out = model(a)
    return {"loss": (F.cross_entropy(out, b, reduction="sum"), len(b)), "seen": (len(b), 1)}
model = run.prepare(model)
found = run.evaluate(model, loader, count)
if run.is_main:
    total = F.cross_entropy(model(x), y, reduction="mean")
    print("difference", abs(found["loss"] - float(total)) <= 1e-12, found["loss"])
counted = run.evaluate(model, loader, lambda m, b: {"n": (len(b[1]), 1 / 21)})
"""
    )
    result = echelon_run(script, workers=4)
    assert result.code == 0, result.err
    assert "difference True" in result.log(0)


@pytest.mark.case("USERS 19")
def test_order_differs_per_epoch_is_reproducible_and_does_not_depend_on_the_world(echelon_run):
    script = (
        HEAD
        + """
import json, random
class Draws(torch.utils.data.Dataset):
    def __len__(self): return 20
    def __getitem__(self, i): return torch.tensor([i]), torch.rand(1), torch.tensor(random.random())
weights = float(sum(p.double().sum() for p in model.parameters()))
loader = run.prepare(DataLoader(Draws(), batch_size=4, shuffle=True))
for epoch in run.epochs(2):
    for ids, drawn, other in loader:
        print("seen", json.dumps([epoch, ids[:, 0].tolist(), drawn[:, 0].tolist(), other.tolist()]), flush=True)
"""
    )

    def seen(result, workers):
        assert result.code == 0, result.err
        epochs = [{}, {}]
        for r in range(workers):
            for line in result.log(r).splitlines():
                if line.startswith("seen"):
                    epoch, ids, drawn, other = json.loads(line[5:])
                    for i, a, b in zip(ids, drawn, other, strict=True):
                        epochs[epoch][i] = (a, b)
        return epochs

    def order(result):
        return [json.loads(li[5:])[1] for li in result.log(0).splitlines() if li.startswith("seen")]

    one, two = echelon_run(script, workers=1), echelon_run(script, workers=2)
    assert seen(one, 1) == seen(two, 2)
    whole = order(one)
    assert whole[:5] != whole[5:]
    assert [batch[:2] for batch in whole] == order(two)


@pytest.mark.case("USERS 20")
@pytest.mark.case("run.phase")
def test_a_named_phase_runs_on_rank_0_and_the_others_wait(echelon_run):
    script = (
        HEAD
        + """
import pathlib
done = pathlib.Path(os.environ["ECHELON_RUN_DIR"]) / "done"
with run.phase("tokenize") as phase:
    print("body", run.rank, flush=True)
    for i in range(5):
        time.sleep(0.3); phase.progress((i + 1) / 5)
    done.write_text("yes")
print("after", done.read_text(), flush=True)
with run.phase("one line"): print("again", run.rank, flush=True)
"""
    )
    result = echelon_run(script, workers=3)
    assert result.code == 0, result.err
    assert [("body" in result.log(r), "again" in result.log(r), "after yes" in result.log(r)) for r in range(3)] == [
        (True, True, True), (False, False, True), (False, False, True)]  # fmt: skip
    states = [(e["name"], e["state"], e["share"]) for e in result.events if e["event"] == "PhaseChanged"]
    assert ("tokenize", "begun", None) in states
    assert ("tokenize", "running", 0.6) in states
    assert ("one line", "over", None) in states


@pytest.mark.case("phase fails")
def test_a_phase_that_fails_on_rank_0_is_the_first_error(echelon_run):
    script = (
        HEAD
        + """
with run.phase("download"):
    raise OSError("no route to the data")
"""
    )
    result = echelon_run(script, workers=3)
    assert result.code == 1
    tail = "\n".join(result.err.splitlines()[-20:])
    assert "OSError: no route to the data" in tail
    assert "2 other workers failed as a consequence" in tail


@pytest.mark.case("USERS 20")
def test_memory_mapped_data_is_not_copied_for_every_worker(echelon_run, tmp_path):
    """Host memory ≤ 1.2 × one copy of the data set: workers share the pages of a mapped file."""
    script = (
        HEAD
        + """
import numpy as np
data = np.lib.format.open_memmap("big.npy", mode="r")
rows = torch.from_numpy(np.asarray(data)) if False else data
class Rows(torch.utils.data.Dataset):
    def __len__(self): return len(rows)
    def __getitem__(self, i): return torch.tensor(rows[i, :6], dtype=torch.float64), y[i % 21]
model, opt, loader = run.prepare(model, opt, DataLoader(Rows(), batch_size=64, shuffle=True))
def private():
    return sum(int(l.split()[1]) for l in open("/proc/self/smaps_rollup") if l.startswith("Private_Dirty")) / 1024
before = private()
for a, b in loader:
    F.cross_entropy(model(a), b).backward(); opt.step(); opt.zero_grad()
print("grown", round(private() - before), flush=True)
"""
    )
    import numpy as np

    big = np.lib.format.open_memmap(
        tmp_path / "big.npy", mode="w+", dtype=np.float64, shape=(4000, 2500)
    )  # 80 MB
    big[:] = 1.0
    big.flush()
    del big
    result = echelon_run(script, workers=4)
    assert result.code == 0, result.err
    grown = [int(result.log(r).split("grown ")[1].split()[0]) for r in range(4)]
    assert sum(grown) < 0.2 * 76 + 4 * 12, grown


@pytest.mark.case("a rank that leaves the loop alone is named")
def test_a_worker_that_leaves_the_loop_alone_is_named(echelon_run):
    script = (
        HEAD
        + """
model, opt, loader = run.prepare(model, opt, DataLoader(TensorDataset(x, y), batch_size=4))
for i, (a, b) in enumerate(loader):
    if run.rank == 1 and i == 2:
        break
    F.cross_entropy(model(a), b).backward(); opt.step(); opt.zero_grad()
"""
    )
    result = echelon_run(script, workers=3)
    assert result.code != 0
    assert result.seconds < 30
    assert "worker 1" in result.err
    assert "left" in result.err


@pytest.mark.case("run.log")
@pytest.mark.case("run.print")
def test_logged_values_are_averaged_by_samples_and_print_is_rank_0s(echelon_run):
    script = (
        HEAD
        + """
model, opt, loader = run.prepare(model, opt, DataLoader(TensorDataset(x, y), batch_size=7))
for a, b in loader:
    F.cross_entropy(model(a), b).backward(); opt.step(); opt.zero_grad()
    run.log(first=a[:, 0].mean(), rank=run.rank)
run.print("hello from", run.rank)
"""
    )
    result = echelon_run(script, workers=3)
    assert result.code == 0, result.err
    import torch

    g = torch.Generator().manual_seed(1)
    x = torch.randn(21, 6, generator=g, dtype=torch.float64)
    metrics = [e for e in result.events if e["event"] == "Metric"]
    assert [m["step"] for m in metrics] == [1, 2, 3]
    for m in metrics:
        part = x[7 * (m["step"] - 1) : 7 * m["step"], 0]
        assert abs(m["values"]["first"] - float(part.mean())) < 1e-12
        assert abs(m["values"]["rank"] - (0 * 3 + 1 * 2 + 2 * 2) / 7) < 1e-12
    assert ["hello" in result.log(r) for r in range(3)] == [True, False, False]


@pytest.mark.case("no pickle")
def test_no_process_of_a_run_unpickles_anything(echelon_run, tmp_path):
    (tmp_path / "no").mkdir()
    (tmp_path / "no" / "sitecustomize.py").write_text(
        "import pickle\n"
        "def refuse(*args, **kwargs): raise SystemExit('somebody unpickled')\n"
        "pickle.loads = pickle.load = refuse\n"
    )
    script = (
        LOOP + "\nrun.evaluate(model, loader, lambda m, b: {'n': (len(b[0]), 1)}); run.save('out/model')\n"
    )
    from tests.conftest import ROOT

    result = echelon_run(script, workers=2, env={"PYTHONPATH": f"{tmp_path / 'no'}:{ROOT}"})
    assert result.code == 0, result.err
    assert (tmp_path / "out" / "model.safetensors").exists()
