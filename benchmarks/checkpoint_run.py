"""What checkpoints cost a whole training run: `checkpoint_every=8` through echelon.init and prepare, beside torch's async_save.

    python benchmarks/checkpoint_run.py --workers 2                    1 GB of state, 12 checkpoints (about 8 minutes)
    python benchmarks/checkpoint_run.py --workers 1 --gigabytes 0.2 --checkpoints 3 --step-s 0.3

A step is forward, backward, the optimizer, and matrix products up to about `--step-s`. Blocks of 8 steps with one checkpoint and
without alternate in one process. Both sides train through Echelon; one saves by `checkpoint_every=8`, the other calls async_save of
the same state at the same step. Told for each:
  blocked    seconds a checkpoint in which the script's thread was in the code that saves: gathering the state, beginning the copy,
             waiting for it before the optimizer changes the weights, waiting for a write that took longer than 8 steps;
             less what the same calls cost in the blocks without
  beside     a block with a checkpoint minus the block without next to it, for each step, blocked time taken off: what copy
             and write take from the cores
  memory     the peak beyond that of the same steps without a checkpoint, in a short run of its own in which malloc gives back at once
             what is freed: otherwise a copy hides in what earlier steps left
Leaves a file in benchmarks/results/, named after the number of workers and cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PEERS = ("echelon", "dcp")
EVERY = 8
WIDTH = 1600


def rss(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


# one worker


class Timer:
    """Adds up the seconds that calls take in the script's thread."""

    def __init__(self) -> None:
        self.total_s = 0.0

    def around(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return fn(*args)
            finally:
                self.total_s += time.perf_counter() - began

        return timed


class Ours:
    """checkpoint_every=8, switched off for the blocks without."""

    def __init__(self, run: Any, timer: Timer, target: str) -> None:
        self.keeping = keeping = run.keeping
        run.machine.at_commit[:] = [timer.around(fn) for fn in run.machine.at_commit]
        run.machine.before_change = timer.around(run.machine.before_change)
        self.fields = {
            on: dataclasses.replace(keeping.strategy, checkpoint_every=EVERY * on) for on in (0, 1)
        }
        self.settle = timer.around(self._settle)

    def switch(self, on: bool) -> None:
        self.keeping.strategy = self.fields[on]

    def _settle(self) -> None:
        from echelon.clock import Deadline

        if self.keeping.last is not None:
            self.keeping.last.wait(Deadline.after(600))


class Theirs:
    """async_save of model and optimizer where checkpoint_every would save, in a group of its own."""

    def __init__(self, run: Any, timer: Timer, target: str, model: Any, optimizer: Any) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=f"file://{target}.meet", rank=run.rank, world_size=1)
        self.group = dist.new_group(backend="gloo")
        self.run, self.target, self.model, self.optimizer = run, target, model, optimizer
        self.under_way: Any = None
        self.settle = timer.around(self._settle)

    def switch(self, on: bool) -> None:
        if on:
            self._save()

    def _save(self) -> None:
        import torch.distributed.checkpoint as dcp

        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        path = f"{self.target}/step-{self.run.global_step}"
        self.under_way = dcp.async_save(state, checkpoint_id=path, process_group=self.group)

    def _settle(self) -> None:
        if self.under_way is not None:
            self.under_way.result()
            self.under_way = None
            if self.run.rank == 0:
                for old in Path(self.target).glob("step-*"):
                    shutil.rmtree(old)


def worker(args: argparse.Namespace) -> None:
    import torch

    import echelon

    run = echelon.init(keep=1)
    layers = max(1, round(args.gigabytes * 1e9 / 8 / WIDTH**2))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    data = torch.utils.data.TensorDataset(torch.randn(4096, WIDTH))
    model, optimizer, loader = run.prepare(
        model,
        torch.optim.SGD(model.parameters(), 1e-9, momentum=0.9),
        torch.utils.data.DataLoader(data, batch_size=2 * run.world_size),
    )
    timer = Timer()
    a, out = torch.randn(512, 512), torch.empty(512, 512)
    feed = batches(loader)

    def step(products: int) -> None:
        (x,) = next(feed)
        model(x).square().mean().backward()
        for _ in range(products):
            torch.mm(a, a, out=out)
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    bare_s, product_s = clock(lambda: step(0), 3), clock(lambda: torch.mm(a, a, out=out), 50)
    products = round(float(run.reduce(max(0.0, args.step_s - bare_s) / product_s, "mean")))
    while run.global_step % EVERY:
        step(products)
    peer = (
        Ours(run, timer, args.target)
        if args.worker == "echelon"
        else Theirs(run, timer, args.target, model, optimizer)
    )
    told: dict[str, Any] = {"bare_s": bare_s, "products": products, "on": [], "off": []}

    def block(on: bool) -> None:
        timer.total_s = 0.0
        began = time.perf_counter()
        timer.around(peer.switch)(on)
        for _ in range(EVERY):
            step(products)
        whole_s, meanwhile_s = time.perf_counter() - began, timer.total_s
        peer.settle()
        told["on" if on else "off"].append(
            {"seconds": whole_s, "blocked_s": timer.total_s, "write_late_s": timer.total_s - meanwhile_s}
        )

    peer.switch(False)
    block(False)
    Path("/proc/self/clear_refs").write_text("5")
    block(False)
    before = rss("VmHWM")
    told["on"].clear(), told["off"].clear()
    for number in range(args.checkpoints):
        for on in (True, False) if number % 2 else (False, True):
            block(on)
    told |= {
        "memory": rss("VmHWM") - before,
        "state": sum(t.nbytes for t in state_of(model, optimizer)),
        "workers": run.world_size,
    }
    Path(f"{args.out}.{run.rank}").write_text(json.dumps(told))


def batches(loader: Any) -> Any:
    while True:
        yield from loader


def clock(fn: Callable[[], Any], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        fn()
    return (time.perf_counter() - began) / times


def state_of(model: Any, optimizer: Any) -> list[Any]:
    return [*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())]


# both sides


GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def one(
    peer: str, args: argparse.Namespace, checkpoints: int, step_s: float, malloc: dict[str, str]
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        command = [sys.executable, "-m", "echelon", "run", "--workers", str(args.workers), "--run-dir", f"{folder}/run",
                   __file__, "--worker", peer, "--gigabytes", str(args.gigabytes), "--checkpoints", str(checkpoints),
                   "--step-s", str(step_s), "--target", f"{folder}/theirs", "--out", f"{folder}/out"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600, cwd=folder,
                              env={**os.environ, "PYTHONPATH": str(ROOT), **malloc})  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{peer} failed:\n{done.stderr[-3000:]}")
        return [json.loads(Path(f"{folder}/out.{rank}").read_text()) for rank in range(args.workers)]


def judge(told: list[dict[str, Any]], memories: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the slowest rank, checkpoint by checkpoint."""
    rounds = range(len(told[0]["on"]))
    off = statistics.median(block["blocked_s"] for rank in told for block in rank["off"])
    blocked = [max(rank["on"][i]["blocked_s"] for rank in told) - off for i in rounds]
    beside = [
        (told[0]["on"][i]["seconds"] - told[0]["off"][i]["seconds"] - told[0]["on"][i]["blocked_s"]) / EVERY
        for i in rounds
    ]
    shard = told[0]["state"] / told[0]["workers"]
    step_s = statistics.median(block["seconds"] for block in told[0]["off"]) / EVERY
    memory = max(rank["memory"] for rank in memories)
    return {
        "step_s": step_s, "checkpoints": len(blocked), "state_gb": told[0]["state"] / 1e9,
        "blocked_s": statistics.median(blocked), "blocked_s_interval": interval(blocked), "worst_blocked_s": max(blocked),
        "first_blocked_s": blocked[0], "blocked_share_of_a_1_s_step": statistics.median(blocked),
        "blocked_without_s": off, "write_late_s": max(rank["on"][i]["write_late_s"] for rank in told for i in rounds),
        "beside_each_step_s": statistics.median(beside), "beside_each_step_s_interval": interval(beside),
        "memory_gb": memory / 1e9, "memory_in_shards": memory / shard, "ranks": told,
    }  # fmt: skip


def interval(values: Sequence[float], draws: int = 2000) -> list[float]:
    """95 % of the medians of samples drawn from these."""
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(values, k=len(values))) for _ in range(draws))
    return [medians[draws // 40], medians[-draws // 40 - 1]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--gigabytes", type=float, default=1.0, help="weights and optimizer state, all ranks hold the same"
    )
    parser.add_argument("--checkpoints", type=int, default=12)
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument(
        "--folder", default=None, help="where checkpoints are written (default: the temporary folder)"
    )
    parser.add_argument("--worker", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--target", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    import torch

    results = {}
    for peer in PEERS:
        found = results[peer] = judge(
            one(peer, args, args.checkpoints, args.step_s, {}), one(peer, args, 2, 0.0, GIVES_BACK)
        )
        low, high = found["blocked_s_interval"]
        print(
            f"{args.workers} worker(s) {peer:8} {found['state_gb']:.2f} GB, step {found['step_s']:.2f} s: blocked "
            f"{1e3 * found['blocked_s']:.1f} ms a checkpoint [{1e3 * low:.1f}, {1e3 * high:.1f}], "
            f"{found['blocked_share_of_a_1_s_step']:.2%} of 1 s (first {1e3 * found['first_blocked_s']:.1f}, worst "
            f"{1e3 * found['worst_blocked_s']:.1f}); beside it {1e3 * found['beside_each_step_s']:+.0f} ms a step; "
            f"{found['memory_gb']:.2f} GB more, {found['memory_in_shards']:.2f} shards",
            flush=True,
        )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    record = {"date": f"{datetime.now():%Y-%m-%d %H:%M}", "commit": commit.stdout.strip(), "cpu": cpu, "cores": os.cpu_count(),
              "python": platform.python_version(), "torch": torch.__version__, "gigabytes": args.gigabytes, "every": EVERY,
              "workers": args.workers, "results": results}  # fmt: skip
    path = ROOT / "benchmarks" / "results" / (
        f"{datetime.now():%Y-%m-%d}-checkpoint-run-{args.workers}workers-{os.cpu_count()}cores.json"
    )  # fmt: skip
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path.relative_to(ROOT)}")
    return None


if __name__ == "__main__":
    main()
