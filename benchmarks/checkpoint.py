"""What a checkpoint of 1 GB costs training: Echelon beside torch.distributed.checkpoint.async_save, in alternating rounds.

    python benchmarks/checkpoint.py                1 and 2 workers, 5 rounds each (about 15 minutes on 2 cores)
    python benchmarks/checkpoint.py --rounds 2 --workers 1 --gigabytes 0.2

A step is about 1 s of matrix products, then an update of the state in place; a checkpoint is begun every 8th step. Told for
each: seconds that the script was blocked a checkpoint, the mean step with checkpoints minus the mean step without (what the
background takes from the cores), and the memory beyond the state at the peak. Medians; leaves a file in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PEERS = ("none", "echelon", "dcp")
EVERY = 8
STEPS = 25
NUM_TENSORS = 25


def rss(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


# one worker of one round


def worker(args: argparse.Namespace) -> None:
    import torch

    from echelon.control import member as members

    member = members.current()
    assert member is not None, "started by `echelon run`"
    rank, size = member.place.rank, member.place.world_size
    numel = int(args.gigabytes * 1e9 / 4 / NUM_TENSORS)
    state = {f"layer.{i}.weight": torch.randn(numel // 1000, 1000) for i in range(NUM_TENSORS)}
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    out = torch.empty(1024, 1024)
    save, settle, finish = {"none": nothing, "echelon": ours, "dcp": theirs}[args.worker](
        args, rank, size, member, state
    )

    def step(number: int) -> float:
        blocked = save(number) if number % EVERY == 1 else 0.0
        for _ in range(args.products):  # forward and backward
            torch.mm(a, b, out=out)
        blocked += settle()
        for tensor in state.values():  # the optimizer's step
            tensor[:10] += 0.001
        return blocked

    for tensor in state.values():
        tensor[:10] += 0.001
    Path("/proc/self/clear_refs").write_text("5")
    before = rss("VmRSS")
    first = step(0)
    began, blocked, times = time.perf_counter(), [], []
    for number in range(1, STEPS):
        start = time.perf_counter()
        spent = step(number)
        times.append(time.perf_counter() - start)
        if number % EVERY == 1:
            blocked.append(spent)
    total = time.perf_counter() - began
    finish()
    if rank == 0:
        told = {"blocked_s": blocked, "step_s": total / (STEPS - 1), "steps": times, "memory": (rss("VmHWM") - before) / 1e9,
                "first": first}  # fmt: skip
        Path(args.out).write_text(json.dumps(told))


def nothing(args: Any, rank: int, size: int, member: Any, state: Any) -> Any:
    return (lambda number: 0.0), (lambda: 0.0), (lambda: None)


def ours(args: Any, rank: int, size: int, member: Any, state: Any) -> Any:
    from echelon.checkpoint.holding import Holding
    from echelon.checkpoint.meeting import MemberMeeting
    from echelon.checkpoint.saver import Saver
    from echelon.clock import Deadline
    from echelon.mesh.layout import Key, Span

    saver = Saver(args.target, rank, size, MemberMeeting(member, rank, size), lambda event: None, keep=1)
    every = tuple(range(size))
    held = [Holding(Key(n), t, Span.whole(tuple(t.shape)), every) for n, t in state.items()]
    saver.reserve(held)
    seen = 0.0

    def since() -> float:
        nonlocal seen
        spent, seen = saver.stall_s - seen, saver.stall_s
        return spent

    def save(number: int) -> float:
        saver.save(number, held, {"step": number}, {})
        return since()

    def settle() -> float:
        saver.before_change()
        return since()

    def finish() -> None:
        saver.finish(Deadline.after(300))
        assert saver.last is not None
        saver.last.wait()
        saver.close()

    return save, settle, finish


def theirs(args: Any, rank: int, size: int, member: Any, state: Any) -> Any:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo", init_method=f"file://{args.target}.meet", rank=rank, world_size=size)
    under_way: list[Any] = []

    def save(number: int) -> float:
        began = time.perf_counter()
        if under_way:
            under_way.pop().result()
        old = Path(args.target) / f"step-{number - 2 * EVERY}"
        if rank == 0 and old.exists():
            shutil.rmtree(old)
        under_way.append(dcp.async_save(state, checkpoint_id=f"{args.target}/step-{number}"))
        return time.perf_counter() - began

    def finish() -> None:
        under_way.pop().result()
        dist.destroy_process_group()

    return save, (lambda: 0.0), finish


# the rounds


def products_of_a_second(workers: int) -> int:
    """How many products make a step of about 1 s with the threads that a worker gets."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    program = (
        f"import torch, time; torch.set_num_threads({threads}); a = torch.randn(1024, 1024); [a @ a for _ in range(20)]\n"
        "began = time.perf_counter(); [a @ a for _ in range(100)]; print(100 / (time.perf_counter() - began))"
    )
    return round(
        float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout)
    )


def one(peer: str, workers: int, products: int, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "echelon", "run", "--workers", str(workers), "--run-dir", f"{folder}/run", __file__,
                   "--worker", peer, "--products", str(products), "--gigabytes", str(args.gigabytes),
                   "--target", f"{folder}/checkpoints", "--out", str(out)]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env, cwd=folder)
        if not out.exists():
            raise SystemExit(f"{peer} failed:\n{done.stderr[-3000:]}")
        return dict(json.loads(out.read_text()))


def measure(workers: int, args: argparse.Namespace) -> dict[str, Any]:
    products = products_of_a_second(workers)
    rounds: dict[str, list[dict[str, Any]]] = {peer: [] for peer in PEERS}
    for number in range(args.rounds):
        for peer in PEERS if number % 2 == 0 else reversed(PEERS):
            rounds[peer].append(one(peer, workers, products, args))
    bare = statistics.median(r["step_s"] for r in rounds["none"])
    found: dict[str, Any] = {"step_s": bare, "products": products}
    for peer in PEERS[1:]:
        blocked = [spent for r in rounds[peer] for spent in r["blocked_s"]]
        added = [r["step_s"] - n["step_s"] for r, n in zip(rounds[peer], rounds["none"], strict=True)]
        found[peer] = {
            "blocked_s": statistics.median(blocked),
            "worst_blocked_s": max(blocked),
            "blocked_share": statistics.median(blocked) / bare,
            "added_to_each_step_s": statistics.median(added),
            "memory_gb": statistics.median(r["memory"] for r in rounds[peer]),
            "rounds": rounds[peer],
        }
        one_ = found[peer]
        print(
            f"{workers} worker(s) {peer:8} blocked {1e3 * one_['blocked_s']:7.1f} ms a checkpoint ({one_['blocked_share']:.1%} of a "
            f"step of {bare:.2f} s, worst {1e3 * one_['worst_blocked_s']:.0f} ms), each step {1e3 * one_['added_to_each_step_s']:+.0f} ms, "
            f"{one_['memory_gb']:.2f} GB more",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument(
        "--folder", default=None, help="where checkpoints are written (default: the temporary folder)"
    )
    parser.add_argument("--worker", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--products", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--target", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    import torch

    results = {str(workers): measure(workers, args) for workers in args.workers}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "",
    )
    record = {"date": f"{datetime.now():%Y-%m-%d %H:%M}", "commit": commit.stdout.strip(), "cpu": cpu, "cores": os.cpu_count(),
              "python": platform.python_version(), "torch": torch.__version__, "gigabytes": args.gigabytes, "every": EVERY,
              "results": results}  # fmt: skip
    path = (
        ROOT / "benchmarks" / "results" / f"{datetime.now():%Y-%m-%d}-checkpoint-{os.cpu_count()}cores.json"
    )
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path.relative_to(ROOT)}")
    return None


if __name__ == "__main__":
    main()
