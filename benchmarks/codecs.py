"""Ratio, error and time of every codec on the gradients of real models, one thread.

    python benchmarks/codecs.py [--rounds 5]

Ratio: bytes sent by a worker of two, against none. Error: |coded - true| / |true| of one worker's gradient without feedback.
Time: to code a gradient and decode that of two workers, in ms for a million parameters, the best of the rounds. Leaves a file in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).parent))
import models  # noqa: E402

from echelon import coding  # noqa: E402
from echelon.comm.alone import AloneGroup  # noqa: E402
from echelon.parallel import buckets  # noqa: E402
from echelon.parallel.coded import CodedWire, Coder  # noqa: E402

CODECS = ["fp16", "bf16", "int8", "1bit", "topk:0.01", "powersgd:4"]


class Two(AloneGroup):
    """As if there were a second worker that has nothing to add: the plan is that of two, nothing is sent."""

    size = 2

    def all_gather(self, out: Tensor, x: Tensor):  # type: ignore[no-untyped-def]
        out.zero_()
        return super().all_gather(out[:1], x)


def gradient(name: str) -> nn.Module:
    """The model with the gradient of its first batch."""
    model, data, _, _ = models.case(name)
    x, y = data[:16]
    out = model(x)
    F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1)).backward()
    return model


def measure(model: nn.Module, text: str, rounds: int) -> dict[str, float]:
    group, compression = Two(), coding.read(text)
    assert compression is not None
    slots = [buckets.Slot(i, n, p, False) for i, (n, p) in enumerate(model.named_parameters())]
    made = buckets.lay(slots, group, coded=True)
    wire = CodedWire(group, compression)
    wire.build(made)
    coders: list[Coder] = wire.coders
    times, errors = [], []
    for _ in range(rounds):
        for slot in slots:
            assert slot.view is not None
            slot.view.copy_(slot.param.grad if slot.param.grad is not None else torch.zeros_like(slot.param))
        true = [bucket.flat.clone() for bucket in made]
        for coder in coders:
            coder.own.live.zero_()
        began = time.perf_counter()
        for coder in coders:
            for _work in coder.meet():
                pass
        times.append(time.perf_counter() - began)
        gap = sum(float((b.flat - t).norm()) ** 2 for b, t in zip(made, true, strict=True))
        errors.append((gap / sum(float(t.norm()) ** 2 for t in true)) ** 0.5)
    numel = sum(b.flat.numel() for b in made)
    return {
        "ratio": round(sum(c.plain_bytes for c in coders) / sum(c.sent_bytes for c in coders), 2),
        "error": float(f"{errors[-1]:.3g}"),
        "ms_a_million": round(1e3 * min(times) / (numel / 1e6), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in ("mlp-1m", "resnet18", "transformer-25m"):
        model = gradient(name)
        results[name] = {text: measure(model, text, options.rounds) for text in CODECS}
        for text, row in results[name].items():
            print(f"{name:12} {text:12} {row}", flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    said = {
        "date": datetime.now().strftime("%Y-%m-%d %H:%M"),
        "commit": commit,
        "cores": os.cpu_count(),
        "load_of_the_last_minute": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "results": results,
    }
    path = ROOT / "benchmarks" / "results" / f"{datetime.now():%Y-%m-%d}-codecs-{os.cpu_count()}cores.json"
    path.write_text(json.dumps(said, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
