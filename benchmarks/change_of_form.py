"""Runs stopped by SIGTERM under one form and resumed under another: how far are the final weights from those of a training that was never stopped?

    python benchmarks/change_of_form.py --folder /tmp/changes        three models, six changes, about 6 minutes on 2 cores; cells found in the folder are kept
    python benchmarks/change_of_form.py --models T5 --no-file

Needs transformers beside Echelon: pip install transformers. Eight steps of AdamW in float64 (hugging_face_worker.py), two epochs; SIGTERM comes to the
supervisor in the fourth step or later, and the run must end with exit code 75. The training that was never stopped is plain PyTorch in one process.
"apart" is as in model_zoo.py. "same_parts" is the same beside plain PyTorch that takes the batches in as many parts as the workers of either form do:
what stopping and going on adds, where a model computes in float32 inside and parts alone make a difference ("cut": two parts in every step).
BatchNorm meets over the workers, so there a batch is one part.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import transformers
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
import beside
import model_zoo
from hugging_face import BATCHNORM

MODELS = ("Qwen3", "T5", "ResNet")
FORMS = {**model_zoo.FORMS, "allreduce, 3 workers": "allreduce"}
CHANGES = (
    ("pipeline=2", "tensor=2"),
    ("pipeline=2", "sharded"),
    ("sharded", "allreduce, 3 workers"),
    ("tensor=2", "pipeline=2"),
    ("sharded", "pipeline=2"),
    ("allreduce, 3 workers", "sharded"),
)
TRAINING = ("--optimizer", "adamw", "--epochs", "2")
STEPS, STOP_AT, PREEMPTED = 8, 3, 75


def command(form: str, name: str, weights: Path, *options: str) -> list[str]:
    workers = "3" if "3 workers" in form else "2"
    run = [sys.executable, "-m", "echelon", "run", "--workers", workers, "--strategy", FORMS[form], *options]
    return [*run, model_zoo.WORKER, name, str(weights), *TRAINING]


def stopped(form: str, name: str, weights: Path, env: dict[str, str]) -> tuple[int, str]:
    """Starts the run, sends SIGTERM once it has made STOP_AT steps; its exit code and all it wrote."""
    began = command(form, name, weights, "--name", "stopped")
    with subprocess.Popen([*began, "--pause", "0.2"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:  # fmt: skip
        assert run.stdout is not None
        output = ""
        for line in run.stdout:
            output += line
            if line.endswith(f"step {STOP_AT}\n"):
                run.send_signal(signal.SIGTERM)
        return run.wait(model_zoo.LIMIT_S), output


def parts(form: str) -> int:
    """Workers that have a part each; the others have the whole batch."""
    return 3 if "3 workers" in form else 2 if form == "sharded" else 1


def change(name: str, first: str, then: str, folder: Path) -> model_zoo.Cell:
    theirs, ours = model_zoo.plain(name, folder, *TRAINING), folder / f"{name}-{first}-{then}.safetensors"
    ours.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as runs:
        env = model_zoo.environment() | {"ECHELON_RUNS": runs}
        code, output = stopped(first, name, ours, env)
        kept = sorted(Path(runs, "stopped", "checkpoints").glob("step-*"))
        if code != PREEMPTED or not kept or ours.exists():
            return {"code": code, "reason": f"stopped under {first}: {model_zoo.reason(output)}"}
        at = int(re.sub(r"\D", "", kept[-1].name))
        resumed = command(then, name, ours, "--resume", "stopped")
        done = subprocess.run(resumed, env=env, capture_output=True, text=True, timeout=model_zoo.LIMIT_S)
    if done.returncode:
        return {"code": done.returncode, "reason": f"resumed under {then}: {model_zoo.reason(done.stdout + done.stderr)}"}  # fmt: skip
    assert 0 < at < STEPS, at
    largest, where = model_zoo.apart(load_file(ours), load_file(theirs))
    found = {"apart": largest, "in": where, "stopped_after_step": at, "of": STEPS}
    if name in BATCHNORM:
        return found
    each = ",".join(str(parts(first if step < at else then)) for step in range(STEPS))
    alike = model_zoo.plain(name, folder, *TRAINING, "--parts", each)
    return found | {"same_parts": model_zoo.apart(load_file(ours), load_file(alike))[0]}


def main() -> None:
    parser = beside.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument(
        "--folder", type=Path, help="cells and weights are kept here, and the next call goes on"
    )
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    kept = folder / "changes.json"
    cells: dict[str, dict[str, model_zoo.Cell]] = json.loads(kept.read_text()) if kept.exists() else {}
    for name in asked.models:
        row = cells.setdefault(name, {})
        if name not in BATCHNORM and "cut" not in row:
            row["cut"] = model_zoo.cut(name, folder, *TRAINING)
            print(f"{name}: cut {model_zoo.shown(row['cut'])}", flush=True)
        for first, then in CHANGES:
            key = f"{first} -> {then}"
            row[key] = row.get(key) or change(name, first, then, folder)
            print(
                f"{name}: {key}: {model_zoo.shown(row[key])}, same parts {row[key].get('same_parts')}",
                flush=True,
            )
            kept.write_text(json.dumps(cells, indent=1))
    beside.leave("change-of-form", cells, asked, forms=FORMS, transformers=transformers.__version__)


if __name__ == "__main__":
    main()
