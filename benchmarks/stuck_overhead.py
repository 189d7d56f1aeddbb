"""What it costs to be watched: told in three ways, each with what it can resolve.

    python benchmarks/stuck_overhead.py                            3000 pairs of blocks of 10 steps: about 5 minutes
    python benchmarks/stuck_overhead.py --steps 300 --pairs 300    long blocks, each with a beat or two: about 6 minutes

1. fixed costs: CPU time of one wait, label, count, of a beat with its stack beside a bare one, of what coordinator and supervisor do
   with it, each alone; how many of them a step has, counted in a real run. Added up against steps of 3 ms to 1 s.
2. CPU time of the workers in pairs of short blocks of steps with the watch and without, in random order, in one run of two workers:
   what a noisy machine does to wall time does not count here.
3. wall time of the same blocks.
"Without" takes away the record of waits, labels and progress, and what the watch adds to a beat: stack, place, progress, wait. Pairs are
neighbours, so both see the same machine; told is the median of their relative differences, with the interval in which 95 % of bootstrap
samples have theirs. What falls into few short blocks (a beat, twice a second) is not in a median: the fixed costs and long blocks have it.
Leaves a file in benchmarks/results/, named after the steps of a block and the cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STEPS_S = (0.003, 0.01, 0.1, 1.0)
"""Lengths of steps for which the fixed costs are added up."""


# the run of two workers


class Nothing:
    def __init__(self, *args: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


class Switch:
    """The watch of this process, on and off."""

    def __init__(self) -> None:
        from echelon import activity
        from echelon.control import member

        self.activity, self.member = activity, member
        self.whole = (activity.waiting, activity.inside, activity.moved, member.complete)
        self.bare = (Nothing, Nothing, lambda: None, lambda beat, rank: dataclasses.replace(beat, rank=rank))
        self.counted: Counter[str] = Counter()

    def set(self, on: bool) -> None:
        self._put(self.whole if on else self.bare)

    def count(self) -> None:
        """On, and counting what a step has."""

        def counting(name: str, what: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                self.counted[name] += 1
                return what(*args)

            return call

        names = ("waits", "labels", "counts", "beats")
        self._put(tuple(counting(name, what) for name, what in zip(names, self.whole, strict=True)))

    def _put(self, parts: Sequence[Any]) -> None:
        self.activity.waiting, self.activity.inside, self.activity.moved = parts[:3]  # type: ignore[misc]
        self.member.complete = parts[3]


def worker(args: argparse.Namespace) -> None:
    import torch

    import echelon

    run = echelon.init()
    data = torch.utils.data.TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
    model = torch.nn.Linear(8, 1)
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), 0.01), torch.utils.data.DataLoader(data, batch_size=16)
    )
    feed, switch = batches(loader), Switch()

    def steps() -> None:
        for _ in range(args.steps):
            x, y = next(feed)
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    def block(on: bool) -> tuple[float, float]:
        switch.set(on)
        run.reduce(0.0, "max")
        cpu, began = time.process_time(), time.perf_counter()
        steps()
        return time.process_time() - cpu, time.perf_counter() - began

    switch.count()
    steps()
    switch.counted.clear()
    steps()
    each = {name: switch.counted[name] / args.steps for name in ("waits", "labels", "counts")}
    block(True), block(False)
    order = random.Random(1)  # the same on both ranks
    pairs = []
    for _ in range(args.pairs):
        pair = {on: block(on) for on in order.sample((True, False), 2)}
        pairs.append([pair[True], pair[False]])
    switch.set(True)
    Path(f"{args.out}.{run.rank}").write_text(json.dumps({"pairs": pairs, "each": each}))


def batches(loader: Any) -> Any:
    while True:
        yield from loader


# each cost alone


def cpu_us(fn: Callable[[], Any], times: int) -> float:
    """The least of 15 rounds: what it costs when nothing is in the way."""
    best = float("inf")
    for _ in range(15):
        began = time.thread_time()
        for _ in range(times):
            fn()
        best = min(best, (time.thread_time() - began) / times)
    return best * 1e6


def fixed_costs() -> dict[str, float]:
    from echelon import activity
    from echelon.control import beat, frames, stacks
    from echelon.elastic.history import read_event
    from echelon.elastic.lookout import Lookout
    from echelon.elastic.membership import Change
    from echelon.events import Beat

    def wait() -> None:
        with activity.waiting("gradients", 1, "all_reduce", 64):
            pass

    def label() -> None:
        with activity.inside("data"):
            pass

    def deep(levels: int, fn: Callable[[], Any]) -> Any:
        """With a stack as deep as a script's in torch."""
        return deep(levels - 1, fn) if levels else fn()

    bare = dataclasses.replace(Beat(step=7, samples=100), rank=0)
    full = deep(30, lambda: beat.complete(Beat(step=7, samples=100), 0))
    full = dataclasses.replace(
        full,
        waits_in="all_reduce of gradients",
        waits_group="gradients",
        waits_number=9,
        begun={"gradients": 9},
    )
    lookout, seats = Lookout(), {rank: Change(1, rank, "joined", "", "vm", 100 + rank) for rank in range(2)}

    def heard(what: Beat) -> Callable[[], Any]:
        packed = frames.pack(what.to_dict())
        return lambda: read_event(frames.unpack(packed))

    def look() -> None:
        lookout.look(seats, 2)

    for rank in range(2):
        lookout.beat(dataclasses.replace(full, rank=rank))
    return {
        "wait_us": cpu_us(wait, 5000),
        "label_us": cpu_us(label, 5000),
        "count_us": cpu_us(activity.moved, 5000),
        "beat_made_us": deep(30, lambda: cpu_us(lambda: beat.complete(Beat(step=7, samples=100), 0), 200))
        - cpu_us(lambda: dataclasses.replace(Beat(step=7, samples=100), rank=0), 200),
        "beat_sent_us": cpu_us(lambda: frames.pack(full.to_dict()), 200)
        - cpu_us(lambda: frames.pack(bare.to_dict()), 200),
        "beat_heard_us": cpu_us(heard(full), 200)
        - cpu_us(heard(bare), 200)
        + cpu_us(lambda: lookout.beat(full), 200),
        "look_us": cpu_us(look, 200),
        "process_seen_us": cpu_us(lambda: stacks.state(os.getpid()), 200),
    }


def added_up(fixed: dict[str, float], each: dict[str, float]) -> dict[str, Any]:
    """Shares of a worker's core: in its own process, and what the others spend on it, for steps of several lengths."""
    from echelon.control.member import BEAT_S

    step_us = sum(each[f"{name}s"] * fixed[f"{name}_us"] for name in ("wait", "label", "count"))
    worker_us = (fixed["beat_made_us"] + fixed["beat_sent_us"]) / BEAT_S
    others_us = fixed["beat_heard_us"] / BEAT_S + fixed["look_us"] + fixed["process_seen_us"]
    return {
        "step_us": step_us, "worker_us_a_second": worker_us, "others_us_a_second": others_us,
        "share_of_a_step": {f"{s:g} s": step_us / 1e6 / s + (worker_us + others_us) / 1e6 for s in STEPS_S},
    }  # fmt: skip


# the pairs


def compare(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Relative differences of neighbours, CPU of all workers together, wall of the first."""
    found: dict[str, Any] = {"pairs": len(ranks[0]["pairs"])}
    both = list(zip(*(rank["pairs"] for rank in ranks), strict=True))
    cpu = [[sum(rank[side][0] for rank in pair) for side in (0, 1)] for pair in both]
    wall = [[pair[0][side][1] for side in (0, 1)] for pair in both]
    for name, pairs in (("cpu", cpu), ("wall", wall)):
        usual = statistics.median(off for _, off in pairs)
        differences = [(on - off) / usual for on, off in pairs]
        found[name] = {
            "median": statistics.median(differences), "interval": interval(differences),
            "block_without_ms": 1e3 * usual,
        }  # fmt: skip
    return found


def interval(values: Sequence[float], draws: int = 1000) -> list[float]:
    """95 % of the medians of samples drawn from these."""
    source = random.Random(0)
    found = sorted(statistics.median(source.choices(values, k=len(values))) for _ in range(draws))
    return [found[draws // 40], found[-draws // 40 - 1]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=10, help="of a block")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    with tempfile.TemporaryDirectory() as name:
        out = f"{name}/pairs"
        command = [sys.executable, "-m", "echelon", "run", "--workers", "2", "--run-dir", f"{name}/run", __file__,
                   "--worker", "--pairs", str(args.pairs), "--steps", str(args.steps), "--out", out]  # fmt: skip
        subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=3600)
        ranks = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]
    sys.path.insert(0, str(ROOT))
    fixed = fixed_costs()
    each = ranks[0]["each"]
    found = {"fixed": fixed, "of_a_step": each, "added_up": added_up(fixed, each), "measured": compare(ranks)}
    print(json.dumps(found, indent=1))
    for name in ("cpu", "wall"):
        one = found["measured"][name]
        low, high = one["interval"]
        print(
            f"{name:4} {one['median']:+.2%} [{low:+.2%}, {high:+.2%}] of blocks of {one['block_without_ms']:.1f} ms"
        )
    shares = ", ".join(
        f"{share:.3%} of {length}" for length, share in found["added_up"]["share_of_a_step"].items()
    )
    print(f"fixed costs: {shares}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    record = {"date": f"{datetime.now():%Y-%m-%d %H:%M}", "commit": commit.stdout.strip(), "cores": os.cpu_count(),
              "python": platform.python_version(), "results": found}  # fmt: skip
    name = f"{datetime.now():%Y-%m-%d}-stuck-overhead-{args.steps}steps-{os.cpu_count()}cores.json"
    path = ROOT / "benchmarks" / "results" / name
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path.relative_to(ROOT)}")
    return None


if __name__ == "__main__":
    main()
