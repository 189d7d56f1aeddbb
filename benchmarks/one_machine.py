"""Plain PyTorch with all of this machine's threads beside as many workers as it has cores, one thread each: who needs longer for a step?

    python benchmarks/one_machine.py                    about 2 minutes on 2 cores
    python benchmarks/one_machine.py --models gpt --rounds 8 --no-file

The same script is started by `python` and by `echelon run`; both train the same batches, in alternating rounds, and who has not its turn sleeps.
A round took as long as its slowest worker. Numbers are Echelon's time over the plain loop's: above 1 workers are slower. Plain PyTorch gets the
allocator that workers get.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import beside
import record

from echelon.launch import allocator

MODELS = ("gpt", "mlp", "convnet")
ROUND_S, START_S = 0.5, 60.0
WORKER = Path(__file__).with_name("one_machine_worker.py")


class Side:
    """Processes that train when they are told to, each through two named pipes."""

    def __init__(self, command: list[str], folder: Path, processes: int) -> None:
        folder.mkdir()
        for rank in range(processes):
            os.mkfifo(folder / f"go-{rank}")
            os.mkfifo(folder / f"took-{rank}")
        env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        env |= {"PYTHONPATH": str(record.ROOT), "CUDA_VISIBLE_DEVICES": "", **allocator.variables(env)}
        self.output = (folder / "output").open("wb")
        self.process = subprocess.Popen(command, env=env, stdout=self.output, stderr=self.output)
        self.go, self.took = [], []
        for rank in range(processes):
            self.go.append((folder / f"go-{rank}").open("w", buffering=1))
            self.took.append((folder / f"took-{rank}").open())

    def steps(self, count: int) -> float:
        """Seconds a step, of the slowest process. 0 steps end them."""
        for pipe in self.go:
            pipe.write(f"{count}\n")
        return max(float(pipe.readline()) for pipe in self.took) / max(1, count)

    def end(self) -> None:
        self.steps(0)
        assert self.process.wait(START_S) == 0
        self.output.close()


def measure(model: str, workers: int, rounds: int, scratch: Path) -> dict[str, object]:
    """Milliseconds a step of both, and the quartiles of Echelon's over the plain loop's."""
    run = [
        sys.executable,
        "-m",
        "echelon",
        "run",
        "--workers",
        str(workers),
        "--run-dir",
        str(scratch / "run"),
    ]
    ours, plain = scratch / "echelon", scratch / "plain"
    sides = {
        "plain": Side([sys.executable, str(WORKER), "plain", model, str(plain)], plain, 1),
        "echelon": Side([*run, str(WORKER), "echelon", model, str(ours)], ours, workers),
    }
    for side in sides.values():
        side.steps(5)
    count = max(1, round(ROUND_S / sides["plain"].steps(10)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(sorted(sides), len(sides)):
            times[name].append(sides[name].steps(count))
    for side in sides.values():
        side.end()
    ratios = sorted(ours / plain for ours, plain in zip(times["echelon"], times["plain"], strict=True))
    return {
        "of_plain": statistics.median(ratios),
        "lower": ratios[len(ratios) // 4],
        "upper": ratios[3 * len(ratios) // 4],
        "rounds": rounds,
        "steps_a_round": count,
        **{f"{name}_ms": 1e3 * statistics.median(spent) for name, spent in times.items()},
    }


def main() -> None:
    parser = beside.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--workers", type=int, default=record.cores())
    asked = parser.parse_args()
    results = {}
    for model in asked.models:
        with tempfile.TemporaryDirectory() as scratch:
            found = results[model] = measure(model, asked.workers, asked.rounds, Path(scratch))
        print(f"{model:8} plain {found['plain_ms']:8.2f} ms  echelon {found['echelon_ms']:8.2f} ms  of plain "
              f"{found['of_plain']:.2f} ({found['lower']:.2f}–{found['upper']:.2f})", flush=True)  # fmt: skip
    beside.leave("one-machine", results, asked, workers=asked.workers)


if __name__ == "__main__":
    main()
