"""Training steps of DDP, FSDP2 and tensor parallel over the backend "echelon" beside the same over gloo: plain PyTorch programs.

    python benchmarks/backend_steps.py                       2 ranks, about 4 minutes on 2 cores
    python benchmarks/backend_steps.py --ranks 8
    python benchmarks/backend_steps.py --forms tp --models narrow --rounds 8

Each row is one launch: every rank trains the same model over both backends, in rounds whose order is random. Ratios are gloo /
echelon. "Met": median >= the goal and lower quartile >= 0.97 of >= 20 rounds; the goal is 1.5 for models that communicate
much, 1.0 for the others. Tensor parallel sends activations and not gradients, so its models are others; tp-seq
also splits the tokens between its pairs of linears (gather before, reduce-scatter behind). "tensor" is PyTorch's tensor parallel over
gloo beside `tensor=T` of a run, for the same pairs. A round took as long as its
slowest rank. DDP keeps gradients in its buckets on both sides (gradient_as_bucket_view), the optimizer is plain SGD, and each rank has
cores // ranks threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import record

MODELS = {
    "ddp": ("tables-25m", "wide-25m", "transformer-25m", "resnet18", "mlp-1m"),
    "fsdp2": ("tables-25m", "wide-25m", "transformer-25m", "resnet18", "mlp-1m"),
    "tp": ("narrow", "transformer-25m", "blocks", "mlp-1m"),
    "tp-seq": ("narrow", "blocks"),
    "tensor": ("narrow", "transformer-25m", "blocks", "mlp-1m"),
}
HEAVY = ("tables-25m", "wide-25m", "narrow")
"""Much to communicate for their computing: held to the goal of 1.5 under every form."""
LIMIT_S = 240.0


def measure(form: str, model: str, ranks: int, rounds: int) -> dict[str, object]:
    """One launch. Blocks for at most LIMIT_S; ends the ranks that are left when one fails."""
    worker = Path(__file__).with_name("backend_steps_worker.py")
    env = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "PYTHONPATH": str(record.ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "output").open("wb") as output:
            ran = [
                subprocess.Popen([sys.executable, str(worker), str(rank), str(ranks), folder, form, model, str(rounds)],
                                 env=env, stdout=output, stderr=output)
                for rank in range(ranks)
            ]  # fmt: skip
            until = time.monotonic() + LIMIT_S
            try:
                for process in ran:
                    process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
            finally:
                for process in ran:
                    process.kill()
                    process.wait()
        out = Path(folder) / "times.json"
        if not out.exists():
            return {"failed": (Path(folder) / "output").read_text(errors="replace")[-2000:]}
        found = json.loads(out.read_text())
    times = found.pop("times")
    ratios = [g / e for g, e in zip(times["gloo"], times["echelon"], strict=True)]
    return {
        **record.verdict(ratios, 1.5 if model in HEAVY else 1.0),
        **{f"{side}_ms": 1e3 * statistics.median(values) for side, values in times.items()},
        **found,
    }


def judged(found: dict[str, object]) -> str:
    if found["rounds"] < record.ROUNDS_NEEDED:  # type: ignore[operator]
        return "too few rounds"
    return "met" if found["met"] else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--forms", default=",".join(MODELS))
    parser.add_argument("--models", default="", help="only these, separated by commas")
    parser.add_argument("--no-file", action="store_true", help="leave nothing in benchmarks/results")
    asked = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    print(f"{'form':6} {'model':16} {'gloo ms':>9} {'ours ms':>9} {'ratio':>6}  quartiles    goal")
    for form in asked.forms.split(","):
        for model in MODELS[form]:
            if asked.models and model not in asked.models.split(","):
                continue
            found = results[f"{form} {model}"] = measure(form, model, asked.ranks, asked.rounds)
            if "failed" in found:
                print(f"{form:6} {model:16} failed: {str(found['failed'])[-600:]}", flush=True)
                continue
            print(f"{form:6} {model:16} {found['gloo_ms']:9.2f} {found['echelon_ms']:9.2f} {found['median']:6.2f}  "
                  f"{found['lower']:.2f}–{found['upper']:.2f}  {found['goal']:>6}  {judged(found)}"
                  f"{'' if found['same_losses'] else '  LOSSES DIFFER'}", flush=True)  # fmt: skip
    if not asked.no_file:
        path = record.write(f"backend-steps-{asked.ranks}ranks", results, ranks=asked.ranks)
        print(f"written to {path.relative_to(record.ROOT)}")


if __name__ == "__main__":
    main()
