"""One script, several ways to train it, one answer. `make demo` runs this and says at the end how long it took.

Every row of the table is a run of demo_train.py that takes one optimizer step for every 512 samples, in float64. The
weights it ends with are compared to those of the same loop in PyTorch alone. Exit code 1: some run failed or differs.
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("demo_train.py")
LIMIT = 1e-10
"""The largest difference that float64's rounding may explain."""


@dataclass
class Case:
    """One way to train. No workers: plain python, without the launcher."""

    name: str
    workers: int = 0
    options: tuple[str, ...] = ()
    script: tuple[str, ...] = ()

    def command(self, folder: Path) -> list[str]:
        name = f"demo-{folder.name}-{secrets.token_hex(2)}"
        launcher = ["-m", "echelon", "run", "--workers", str(self.workers), "--name", name]
        python = [sys.executable, *(launcher if self.workers else []), *self.options]
        return [*python, str(SCRIPT), *self.script, "--save", str(folder / "weights.safetensors")]

    def shown(self) -> str:
        """The command as a person would type it."""
        start = f"echelon run --workers {self.workers}" if self.workers else "python"
        return " ".join([start, *self.options, SCRIPT.name, *self.script])


CASES = [
    Case("PyTorch alone", script=("--torch",)),
    Case("plain python"),
    Case("all-reduce", 1),
    Case("all-reduce", 2),
    Case("all-reduce", 4),
    Case("accumulate=2", 2, ("--set", "accumulate=2"), ("--batch", "256")),
    Case("microbatches=2", 2, ("--set", "microbatches=2")),
    Case("ps, sums", 2, ("--servers", "1", "--strategy", "ps,servers_share=1")),
    Case("ps, applies", 2, ("--servers", "2", "--strategy", "ps,apply=server")),
    Case("sharded", 2, ("--strategy", "sharded,level=3")),
    Case("tensor", 2, ("--strategy", "tensor=2")),
    Case("pipeline", 2, ("--strategy", "pipeline=2,microbatches=4")),
    Case("data, pipeline", 4, ("--strategy", "data=2,pipeline=2")),
]


def train(case: Case, folder: Path) -> dict[str, float] | None:
    """Runs it on this terminal and gives what it wrote about itself; None if it failed."""
    folder.mkdir()
    # one thread for each worker, so that rows differ by their workers alone
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ECHELON_")} | {
        "OMP_NUM_THREADS": "1"
    }
    if subprocess.run(case.command(folder), env=environment).returncode:
        return None
    return json.loads((folder / "weights.json").read_text())


def difference(one: Path, other: Path) -> float:
    """max |difference| over all weights of two runs."""
    a, b = load_file(one / "weights.safetensors"), load_file(other / "weights.safetensors")
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def row(case: Case, facts: dict[str, float], apart: float | None) -> list[str]:
    """The cells of one run; the reference is apart from nothing."""
    speed = facts["samples"] / facts["seconds"]
    cells = [case.name, str(case.workers or 1), f"{facts['steps']:.0f}", f"{facts['seconds']:.1f} s"]
    cells += [f"{speed:,.0f}", f"{facts['loss']:.6f}"]
    if apart is None:
        return [*cells, "-", "reference"]
    return [*cells, f"{apart:.1e}", "[green]same" if apart <= LIMIT else "[bold red]differs"]


def main() -> int:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 80
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    columns = ["strategy", "workers", "steps", "time", "samples/s", "loss", "diff", "verdict"]
    for name in columns:
        table.add_column(name, justify="left" if name in ("strategy", "verdict") else "right", no_wrap=True)
    all_same, began = True, time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="echelon-demo-") as scratch:
        for number, case in enumerate(CASES):
            console.print(Rule(f"[bold]{number + 1}/{len(CASES)}[/] {case.name}", align="left", style="dim"))
            console.print(case.shown())
            here, reference = Path(scratch, str(number)), Path(scratch, "0")
            facts = train(case, here)
            if facts is None:
                return 1  # its own error is the last thing on the screen
            apart = difference(reference, here) if number else None
            all_same = all_same and (apart or 0.0) <= LIMIT
            table.add_row(*row(case, facts, apart))
            console.print()
    console.print(Rule(f"[bold]one script, {len(CASES)} ways", align="left", style="dim"))
    console.print(table)
    console.print(f"\ndiff: the most that any weight is away from PyTorch alone; same: up to {LIMIT:g}")
    console.print("each step takes 512 samples in all; time is that of the training loop")
    console.print(
        f"one thread a worker on {os.cpu_count()} cores; the demo took {time.perf_counter() - began:.0f} s"
    )
    return 0 if all_same else 1


if __name__ == "__main__":
    sys.exit(main())
