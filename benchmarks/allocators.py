"""Steps of two workers with tcmalloc, with glibc told to keep its memory, with glibc as it is: in alternation, a launch each.

    python benchmarks/allocators.py [--rounds 7] [--models …] [--before TREE] [--also NAME:VARIABLE=VALUE,… …]

`--before` is a checkout of an earlier commit, measured beside. Numbers are medians over launches of the launch's median step;
the ratio is to the first side. `peak` is the most memory of worker 0, `of expected` that over what was predicted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import record

from echelon.launch import allocator

MODELS = ("wide-mlp", "lstm", "mlp-1m", "resnet18", "transformer-25m", "embedding-dense")
SIDES = {
    "tcmalloc": {"ECHELON_MALLOC": "auto"},
    "glibc kept": {"ECHELON_MALLOC": "none", **allocator.GLIBC},
    "glibc plain": {"ECHELON_MALLOC": "none"},
}

SCRIPT = """
import json, statistics, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import echelon

sys.path.insert(0, sys.argv[1])
import models

class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out = nn.LSTM(256, 512, 2, batch_first=True), nn.Linear(512, 100)
    def forward(self, x):
        return self.out(self.body(x)[0][:, -1])

def case(name):
    torch.manual_seed(0)
    if name == "wide-mlp":
        layers = [module for _ in range(3) for module in (nn.Linear(4096, 4096), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(4096, 100)), TensorDataset(torch.randn(256, 4096), torch.randint(0, 100, (256,))), 16
    if name == "lstm":
        return Lstm(), TensorDataset(torch.randn(512, 32, 256), torch.randint(0, 100, (512,))), 16
    return models.case(name)[:3]

run = echelon.init()
model, data, batch = case(sys.argv[2])
opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
model, opt, loader = run.prepare(model, opt, DataLoader(data, batch_size=batch * run.world_size, shuffle=True, drop_last=True))
times, steps = [], int(sys.argv[3])
while len(times) < steps:
    began = time.perf_counter()
    for x, y in loader:
        out = model(x)
        nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1)).backward()
        opt.step()
        opt.zero_grad()
        now = time.perf_counter()
        times.append(now - began)
        began = now
if run.is_main:
    json.dump(statistics.median(times[len(times) // 4 :]), open(sys.argv[4], "w"))
"""
STEPS = {
    "wide-mlp": 40, "lstm": 60, "mlp-1m": 400, "resnet18": 30, "transformer-25m": 16, "embedding-dense": 80,
}  # fmt: skip


def launch(tree: Path, extra: dict[str, str], model: str, folder: Path) -> dict[str, float]:
    """Median seconds a step, and worker 0's peak over what was expected."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("ECHELON_")} | {
        "PYTHONPATH": str(tree), "ECHELON_RUNS": str(folder / "runs"), **extra,
    }  # fmt: skip
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-m", "echelon", "run", "--workers", "2", "--set", "sync_batchnorm=false", "train.py",
               str(record.ROOT / "benchmarks"), model, str(STEPS[model]), str(out)]  # fmt: skip
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    if done.returncode != 0 or not out.exists():
        raise SystemExit(f"{model} with {extra} failed:\n{done.stdout}{done.stderr}")
    told = json.loads((folder / "runs" / "latest" / "run.json").read_text())["measured"]["0"]
    return {
        "step_s": json.loads(out.read_text()),
        "peak_MiB": told["peak_bytes"] / 2**20,
        "of_expected": told["peak_bytes"] / told["peak_bytes_expected"],
    }


def measure(
    model: str, sides: dict[str, tuple[Path, dict[str, str]]], rounds: int, folder: Path
) -> dict[str, dict[str, float]]:
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in list(sides) if number % 2 else reversed(sides):
            found[side].append(launch(*sides[side], model, folder))
    medians = {
        side: {key: statistics.median(each[key] for each in launches) for key in launches[0]}
        for side, launches in found.items()
    }
    first = found[next(iter(sides))]
    for side, row in medians.items():
        row["ratio"] = statistics.median(
            mine["step_s"] / other["step_s"] for mine, other in zip(found[side], first, strict=True)
        )
        print(f"{model:16} {side:14} {1e3 * row['step_s']:8.2f} ms  ratio {row['ratio']:.3f}  "
              f"peak {row['peak_MiB']:6.0f} MiB, {row['of_expected']:.2f} of expected", flush=True)  # fmt: skip
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit, its core built")
    parser.add_argument(
        "--also", nargs="*", default=[], help="NAME:VARIABLE=VALUE,… laid over the environment"
    )
    parser.add_argument("--no-file", action="store_true", help="leave nothing in benchmarks/results")
    asked = parser.parse_args()
    sides = {side: (record.ROOT, extra) for side, extra in SIDES.items()}
    if asked.before:
        sides = {"before": (asked.before, {})} | sides
    for text in asked.also:
        name, _, words = text.partition(":")
        sides[name] = (record.ROOT, dict(word.split("=", 1) for word in words.split(",")))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT)
        results = {model: measure(model, sides, asked.rounds, Path(folder)) for model in asked.models}
    if not asked.no_file:
        path = record.write("allocators", results, load=os.getloadavg(), rounds=asked.rounds)
        print(f"written to {path.relative_to(record.ROOT)}")


if __name__ == "__main__":
    main()
