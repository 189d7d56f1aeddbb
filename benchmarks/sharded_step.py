"""Steps under `sharded` beside plain PyTorch code for the same thing over gloo, in one launch a row.

    python benchmarks/sharded_step.py                       2 workers, about 4 minutes on 2 cores
    python benchmarks/sharded_step.py --workers 4 --levels 3 --models wide-25m

Level 1 beside DDP with ZeroRedundancyOptimizer, levels 2 and 3 beside fully_shard over the same modules; AdamW. Ratios are gloo / echelon,
and ("backend") fully_shard over our backend of torch.distributed / echelon: what our own carrier and plain-tensor optimizer steps give. A round took as
long as its slowest worker. Goals: 1.0, and 1.2 for models that communicate much.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import record

MODELS = ("wide-25m", "transformer-25m", "mlp-1m")
HEAVY = ("wide-25m",)
LIMIT_S = 400.0


def measure(model: str, level: int, workers: int, rounds: int, wrap_mib: float) -> dict[str, object]:
    worker = Path(__file__).with_name("sharded_step_worker.py")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "echelon", "run", "--workers", str(workers), "--run-dir", f"{folder}/run", "--strategy",
                   f"sharded,level={level},wrap_mib={wrap_mib}", str(worker), folder, model, str(level), str(rounds)]  # fmt: skip
        done = subprocess.run(command, cwd=record.ROOT, capture_output=True, text=True, timeout=LIMIT_S)
        out = Path(folder) / "times.json"
        if not out.exists():
            return {"failed": (done.stdout + done.stderr)[-2000:]}
        found = json.loads(out.read_text())
    times = found["times"]
    ratios = {
        side: [peer / ours for peer, ours in zip(times[side], times["echelon"], strict=True)]
        for side in times
        if side != "echelon"
    }
    a, b = found["losses"]["echelon"], found["losses"]["gloo"]
    return {
        **record.verdict(ratios["gloo"], 1.2 if model in HEAVY else 1.0),
        "over_backend": statistics.median(ratios["backend"]) if "backend" in ratios else None,
        **{f"{side}_ms": 1e3 * statistics.median(values) for side, values in times.items()},
        "same_losses": all(abs(x - y) <= 1e-3 * abs(y) for x, y in zip(a, b, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--levels", default="1,2,3")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--wrap-mib", type=float, default=8.0)
    parser.add_argument("--no-file", action="store_true", help="leave nothing in benchmarks/results")
    asked = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    print(
        f"{'level':5} {'model':16} {'gloo ms':>9} {'ours ms':>9} {'ratio':>6}  quartiles    goal  over our backend"
    )
    for level in map(int, asked.levels.split(",")):
        for model in asked.models.split(","):
            found = results[f"level {level} {model}"] = measure(
                model, level, asked.workers, asked.rounds, asked.wrap_mib
            )
            if "failed" in found:
                print(f"{level:5} {model:16} failed: {str(found['failed'])[-600:]}", flush=True)
                continue
            beside = f"{found['over_backend']:.2f}" if found["over_backend"] else "-"
            print(f"{level:5} {model:16} {found['gloo_ms']:9.2f} {found['echelon_ms']:9.2f} {found['median']:6.2f}  "
                  f"{found['lower']:.2f}–{found['upper']:.2f}  {found['goal']:>6}  {beside}"
                  f"{'' if found['same_losses'] else '  LOSSES DIFFER'}", flush=True)  # fmt: skip
    if not asked.no_file:
        path = record.write(f"sharded-step-{asked.workers}workers", results, workers=asked.workers)
        print(f"written to {path.relative_to(record.ROOT)}")


if __name__ == "__main__":
    main()
