"""A worker of `echelon bench comm`: measures the operations of every backend in turn, round by round, in one run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from echelon import start
from echelon.bench.comm import LIMIT, SEGMENT, Cell, calls_for, cell, rounds_for
from echelon.clock import Deadline
from echelon.comm.changing import ChangingGroup
from echelon.comm.group import Group, Met
from echelon.comm.over_native import NativeGroup
from echelon.comm.pick import Groups

WAIT_S, LIMIT_S = 120.0, 3600.0
"""Of one wait; of all of a cell."""
Act = Callable[[], None]


def main(asked: dict[str, Any], out: Path) -> None:
    run = start.init(backend=asked["backends"][0])
    world = run.world
    groups: dict[str, Group] = {}
    for backend in asked["backends"]:
        device = world.device if backend == "nccl" else torch.device("cpu")
        made = Groups(backend, world.rank, world.size, device, run.member).make("bench")
        groups[backend] = (
            made.inner if isinstance(made, ChangingGroup) else made
        )  # the group itself is measured
    cells: list[Cell] = []
    for op in asked["ops"]:
        for num_bytes in asked["sizes"] if op != "barrier" else [0]:
            acts = {name: act(group, op, num_bytes) for name, group in groups.items()}
            native = groups.get("native")
            if op == "all_reduce" and isinstance(native, NativeGroup) and hasattr(native.core, "plain_loop"):
                acts |= in_segment(native, num_bytes)
            calls = calls_for(num_bytes)
            times = measure(world.side, acts, asked.get("rounds") or rounds_for(num_bytes), calls)
            cells += [cell(op, num_bytes, name, seconds, calls) for name, seconds in times.items()]
            if run.is_main:
                print(f"{op} {num_bytes}", file=sys.stderr, flush=True)
    if run.is_main:
        out.write_text(json.dumps([asdict(one) for one in cells]))


def act(group: Group, op: str, num_bytes: int) -> Act:
    """One call of `op` and its wait, with tensors of its own."""
    with torch.device(getattr(group, "device", "cpu")):
        return _act(group, op, num_bytes)


def _act(group: Group, op: str, num_bytes: int) -> Act:
    count, size = num_bytes // 4, group.size
    x, rows = torch.zeros(count), torch.zeros(size, count) if num_bytes <= 1 << 28 else torch.zeros(0)
    piece = max(1, count // size)
    root = group.rank == 0
    flat, received = torch.zeros(piece * size), torch.zeros(piece * size)
    part, spread = torch.zeros(piece), torch.zeros(size, piece)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: group.all_reduce(x),
        "reduce_scatter": lambda: group.reduce_scatter(part, spread),
        "all_gather": lambda: group.all_gather(rows, x),
        "broadcast": lambda: group.broadcast(x),
        "reduce": lambda: group.reduce(x),
        "gather": lambda: group.gather(rows if root else None, x),
        "scatter": lambda: group.scatter(part, spread if root else None),
        "all_to_all": lambda: group.all_to_all(received, flat, [piece] * size, [piece] * size),
        "send": lambda: _around(group, x),
        "barrier": group.barrier,
    }
    begin, deadline, on_gpu = calls[op], Deadline.after(LIMIT_S), x.is_cuda

    def once() -> None:
        work = begin()
        outcome = work.wait(deadline) if work is not None else Met()
        assert isinstance(outcome, Met), outcome
        if on_gpu:
            torch.cuda.synchronize()

    return once


def _around(group: Group, x: torch.Tensor) -> Any:
    """Rank 0 sends to the last rank, which sends back: half of the time is one message."""
    last = group.size - 1
    if group.rank == 0:
        group.send(x, last).wait(Deadline.after(WAIT_S))
        return group.recv(x, last)
    if group.rank == last:
        group.recv(x, 0).wait(Deadline.after(WAIT_S))
        return group.send(x, 0)
    return None


def in_segment(group: NativeGroup, num_bytes: int) -> dict[str, Act]:
    """The same all-reduce of the group's own buffer, and as a bare loop over everybody's."""
    buffer, bare = group.buffer(num_bytes).view(torch.float32), group.buffer(4096 + num_bytes)
    count, deadline = num_bytes // 4, Deadline.after(LIMIT_S)

    def in_place() -> None:
        assert isinstance(group.all_reduce(buffer).wait(deadline), Met)

    return {SEGMENT: in_place, LIMIT: lambda: group.core.plain_loop(bare.data_ptr(), count)}


def measure(side: Group, acts: dict[str, Act], rounds: int, calls: int) -> dict[str, list[float]]:
    """Seconds of the slowest rank, a round of so many calls: everybody starts together, backends take turns."""
    times = torch.zeros(len(acts), rounds, dtype=torch.float64)
    for once in acts.values():
        for _ in range(3):
            once()
    for number in range(rounds):
        order = list(enumerate(acts.values()))
        for place, once in order if number % 2 else reversed(order):
            side.barrier().wait(Deadline.after(WAIT_S))
            began = time.perf_counter()
            for _ in range(calls):
                once()
            times[place, number] = time.perf_counter() - began
    side.all_reduce(times, "max").wait(Deadline.after(WAIT_S))
    return {name: times[place].tolist() for place, name in enumerate(acts)}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
