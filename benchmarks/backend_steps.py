"""Training steps of DDP, FSDP2 and tensor parallel over the backend "echelon" beside the same over gloo: plain PyTorch programs.

    python benchmarks/backend_steps.py                       2 ranks, about 4 minutes on 2 cores
    python benchmarks/backend_steps.py --ranks 8
    python benchmarks/backend_steps.py --forms tp --models narrow --rounds 8

Each row is one launch: every rank trains the same model over both backends, in rounds whose order is random. Ratios are gloo /
echelon. "Met": median >= the goal and lower quartile >= 0.97 of >= 20 rounds; the goal is 1.5 for models that communicate
much, 1.0 for the others. Tensor parallel sends activations and not gradients, so its models are others; tp-seq
also splits the tokens between its pairs of linears (gather before, reduce-scatter behind). "tensor" is PyTorch's tensor parallel over
gloo beside `tensor=T` of a run, for the same pairs, and asked for alone leaves a file of its own (tensor-step). A round took as long as its
slowest rank. DDP keeps gradients in its buckets on both sides (gradient_as_bucket_view), the optimizer is plain SGD, and each rank has
cores // ranks threads.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import beside

MODELS = {
    "ddp": ("tables-25m", "wide-25m", "transformer-25m", "resnet18", "mlp-1m"),
    "fsdp2": ("tables-25m", "wide-25m", "transformer-25m", "resnet18", "mlp-1m"),
    "tp": ("narrow", "transformer-25m", "blocks", "mlp-1m"),
    "tp-seq": ("narrow", "blocks"),
    "tensor": ("narrow", "transformer-25m", "blocks", "mlp-1m"),
}
HEAVY = ("tables-25m", "wide-25m", "narrow")
"""Much to communicate for their computing: held to the goal of 1.5 under every form."""


def main() -> None:
    parser = beside.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--forms", default=",".join(MODELS))
    parser.add_argument("--models", default="", help="only these, separated by commas")
    asked = parser.parse_args()
    worker = str(Path(__file__).with_name("backend_steps_worker.py"))
    rows = [
        beside.Row(
            f"{form} {model}",
            (sys.executable, worker, "RANK", str(asked.ranks), "FOLDER", form, model, str(asked.rounds)),
            1.5 if model in HEAVY else 1.0,
            asked.ranks,
        )
        for form in asked.forms.split(",")
        for model in MODELS[form]
        if not asked.models or model in asked.models.split(",")
    ]
    name = "tensor-step" if asked.forms == "tensor" else "backend-steps"
    beside.leave(f"{name}-{asked.ranks}ranks", beside.table(rows), asked, ranks=asked.ranks)


if __name__ == "__main__":
    main()
