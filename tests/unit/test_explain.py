"""`echelon plan`: what would be done is told by the code that would do it, and nothing is trained."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import environment

SCRIPT = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
import echelon

how = sys.argv[1]
print("the script's own words", *sys.argv[1:])
run = echelon.init(seed=3)
if how == "never":
    sys.exit(0)
if how == "raises":
    raise ValueError("a mistake of the script")
if how == "leaves":
    sys.exit(7)


class Model(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.embed = nn.Embedding(64, 24)
        layer = nn.TransformerEncoderLayer(24, heads, 48, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(24, 64)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)))


model = Model(3 if how == "odd" else 4)
optimizer = torch.optim.AdamW(model.parameters())
words = torch.utils.data.TensorDataset(torch.randint(0, 64, (32, 9)))
loader = torch.utils.data.DataLoader(words, batch_size=8)
if how == "late":
    model = run.prepare(model)
else:
    model, optimizer, loader = run.prepare(model, optimizer, loader)


def loss_fn(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


for epoch in run.epochs(1):
    for (x,) in loader:
        if how == "step":
            run.step(loss_fn, (x[:, :-1], x[:, 1:]))
        else:
            loss_fn(model(x[:, :-1]), x[:, 1:]).backward()
        print("TRAINED")
"""

DRIVER = """
import gc, json, os, sys
import torch._dynamo, torch._subclasses.fake_tensor
import echelon.explain.rehearsal
from echelon.cli import main
gc.freeze()
found = []
for number, args in enumerate(json.loads(sys.argv[1])):
    child = os.fork()  # a rehearsal is one a process; torch is imported once for all of them
    if not child:
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}{number}", os.O_WRONLY | os.O_CREAT), fd)
        main(["plan", *args], prog_name="echelon")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found.append([code, open(f"out{number}").read(), open(f"err{number}").read()])
print(json.dumps(found))
"""

TWO = ["--workers", "2", "--strategy"]
CASES = {
    "tensor": [*TWO, "tensor=2", "--explain", "train.py", "loop", "--lr", "3"],
    "short": [*TWO, "tensor=2", "train.py", "loop"],
    "by name": [*TWO, "tensor=2", "--set", "tensor_plan=head:column", "--explain", "train.py", "loop"],
    "late": [*TWO, "tensor=2", "train.py", "late"],
    "sharded": [*TWO, "sharded,wrap_mib=0.01", "--explain", "train.py", "loop"],
    "pipeline": [*TWO, "pipeline=2,microbatches=4", "--explain", "train.py", "step"],
    "mixed": ["--workers", "8", "--strategy", "data=2,tensor=2,pipeline=2", "train.py", "step"],
    "ps": [*TWO, "ps,apply=server", "--servers", "1", "train.py", "loop"],
    "odd heads": [*TWO, "tensor=2", "train.py", "odd"],
    "plain loop": [*TWO, "pipeline=2", "train.py", "loop"],
    "never": [*TWO, "tensor=2", "train.py", "never"],
    "raises": [*TWO, "tensor=2", "train.py", "raises"],
    "leaves": [*TWO, "tensor=2", "train.py", "leaves"],
}


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", "-c", DRIVER, json.dumps(list(CASES.values()))]
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert not (folder / "runs").exists()
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.case("plan: what would be done")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tensor", ["train.py · 2 workers · allreduce,tensor=2", "attention: 4 heads", "linear1: output features, 24 of 48 a worker",
                    "head: whole; small (64 × 24)", "memory a worker"]),
        ("short", ["tensor=2: 6 layers split", "--explain says it module by module"]),
        ("by name", ["head: column, as asked for"]),
        ("late", ["tensor=2: 6 layers split"]),
        ("sharded", ["split over 2 workers (level 3,", "a step sends about", "  blocks.layers.0: ", "  the rest: ", "layers gathered"]),
        ("pipeline", ["pipeline of 2 stages", "  stage 0: from embed", "  stage 1 has ", "bubble ", "with 4 micro-batches (1f1b)"]),
        ("mixed", ["8 workers", "tensor=2: ", "pipeline of 2 stages"]),
        ("ps", ["2 workers + 1 server · ps", "every worker has the whole model", "gradients"]),
    ],
)  # fmt: skip
def test_it_is_told_and_nothing_is_trained(plans, name, words):
    code, out, err = plans[name]
    assert code == 0, err
    assert [word for word in words if word not in out] == []
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "the script's own words" in err
    assert "TRAINED" not in out + err


def test_the_short_form_has_no_layers(plans):
    assert "self_attn" not in plans["short"][1]
    assert "optimizer state" in " ".join(plans["short"][1].split())
    assert "optimizer state" not in " ".join(plans["ps"][1].split())
    assert "--lr 3" in plans["tensor"][2]


@pytest.mark.case("plan: what is refused")
@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        (
            "odd heads",
            2,
            ["tensor=2 cannot split `blocks.layers.0.self_attn` (3 heads)", "tensor_padding=true"],
        ),
        ("plain loop", 2, ["Write loss = run.step(loss_fn, (inputs, target))"]),
        ("never", 2, ["came to its end without run.prepare(model, …)"]),
        ("raises", 1, ["ValueError: a mistake of the script"]),
        ("leaves", 7, []),
    ],
)
def test_what_is_refused_says_why(plans, name, code, words):
    found, out, err = plans[name]
    assert (found, out) == (code, "")
    assert [word for word in words if word not in err] == []
    assert "rehearsal.py" not in err
