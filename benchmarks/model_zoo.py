"""Model types of Hugging Face, tiny and unchanged, under each form with two workers: how far are the weights from plain PyTorch's?

    python benchmarks/model_zoo.py --folder /tmp/zoo                 23 types, about 12 minutes on 2 cores; cells found in the folder are kept
    python benchmarks/model_zoo.py --models T5 Swin --forms pipeline=2 --no-file

Needs transformers beside Echelon: pip install transformers. Four steps of SGD with momentum in float64 by `run.step`, as hugging_face_worker.py
reads; dropout is 0 in the configs. A cell is max |difference| / max |weight| of the tensor in which that is most
(or a thousandth of the model's largest weight, where that is more). "moved" is the same between
the weights that plain PyTorch starts and ends with. Some models compute their norms or rotations in float32 whatever their weights are:
there 1e-7 is rounding. "cut" is plain PyTorch that takes each batch in two parts, and weights their gradients (not with BatchNorm). What is refused
or fails is written down with its reason.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import transformers
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import beside
import hugging_face
import record
from hugging_face import BATCHNORM

FORMS = {
    "allreduce": "allreduce",
    "pipeline=2": "pipeline=2",
    "tensor=2": "tensor=2",
    "sharded": "sharded,wrap_mib=0.02",  # so that tiny models are several units, as large ones are by default
}
SAID = r"^(tensor=2: .*|pipeline of .*(?:\n  .*)*|parameters, gradients and .*|same answer .*)"
WORKER = str(Path(__file__).with_name("hugging_face_worker.py"))
LIMIT_S = 180.0
NOTHING = 1e-3
"""What is smaller, beside the model's largest weight, is not compared with itself: the biases of keys have no true gradient, and stay rounding."""
Cell = dict[str, object]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(record.ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # fmt: skip


def apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference of two state dicts, and in which tensor."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    numbers = {name: x for name, x in theirs.items() if x.is_floating_point() and x.numel()}
    least = NOTHING * max(x.abs().max().item() for x in numbers.values())
    return max(
        ((ours[name] - x).abs().max().item() / max(x.abs().max().item(), least), name)
        for name, x in numbers.items()
    )


def reason(output: str) -> str:
    """An error's own words: its line and the indented ones under it."""
    told = re.findall(r"^(?:\[.*?\] )?(?:echelon\.errors\.)?(\w*Error: .*(?:\n  .*)*)", output, re.MULTILINE)
    return told[-1] if told else output[-1000:]


def plain(name: str, folder: Path, *training: str) -> Path:
    """The weights of plain PyTorch; made once for a folder."""
    weights = folder / "-".join((name, "plain", *training, ".safetensors"))
    if not weights.exists():
        command = [sys.executable, WORKER, name, str(weights), "--plain", *training]
        subprocess.run(command, env=environment(), check=True, timeout=LIMIT_S, capture_output=True)
    return weights


def cut(name: str, folder: Path, *training: str) -> Cell:
    ours, theirs = plain(name, folder, *training, "--parts", "2"), plain(name, folder, *training)
    largest, where = apart(load_file(ours), load_file(theirs))
    return {"apart": largest, "in": where}


def cell(name: str, form: str, folder: Path) -> Cell:
    if form == "cut":
        return cut(name, folder)
    theirs, ours = plain(name, folder), folder / f"{name}-{form}.safetensors"
    ours.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "echelon",
        "run",
        "--workers",
        "2",
        "--strategy",
        FORMS[form],
        WORKER,
        name,
        str(ours),
    ]
    with tempfile.TemporaryDirectory() as runs:
        env = environment() | {"ECHELON_RUNS": runs}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        return {"code": done.returncode, "reason": reason(done.stdout + done.stderr)}
    largest, where = apart(load_file(ours), load_file(theirs))
    moved, _ = apart(load_file(f"{theirs}.start"), load_file(theirs))
    said = [" ".join(line.split()) for line in re.findall(SAID, done.stderr, re.MULTILINE)]
    return {"apart": largest, "in": where, "moved": moved, "said": said}


def shown(found: Cell) -> str:
    return f"{found['apart']:.0e}" if "apart" in found else f"exit {found['code']}"


def main() -> None:
    parser = beside.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=hugging_face.NAMES, choices=hugging_face.NAMES)
    parser.add_argument("--forms", nargs="+", default=tuple(FORMS), choices=FORMS)
    parser.add_argument(
        "--folder", type=Path, help="cells and weights are kept here, and the next call goes on"
    )
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    kept = folder / "cells.json"
    cells: dict[str, dict[str, Cell]] = json.loads(kept.read_text()) if kept.exists() else {}
    for name in asked.models:
        forms = asked.forms if name in BATCHNORM else ("cut", *asked.forms)
        row = cells.setdefault(name, {})
        print(f"{name:12}", end="", flush=True)
        for form in forms:
            row[form] = row.get(form) or cell(name, form, folder)
            print(f"  {form} {shown(row[form])}", end="", flush=True)
            kept.write_text(json.dumps(cells, indent=1))
        print()
    beside.leave("model-zoo", cells, asked, workers=2, forms=FORMS, transformers=transformers.__version__)


if __name__ == "__main__":
    main()
