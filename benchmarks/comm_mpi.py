"""All-reduce on one host: a Group over shared memory beside OpenMPI's Allreduce, in the same processes.

    python benchmarks/comm_mpi.py [--ranks 2] [--rounds 40] [--sizes 1024,…] [--mca mpi_yield_when_idle=1 …] [--out FILE]

Needs mpirun (Debian: openmpi-bin libopenmpi-dev) and mpi4py, which is no dependency of the project: a virtual environment of
its own, or `pip install --target DIR mpi4py` and DIR on PYTHONPATH. One launch by mpirun, in which each process is a rank of
both; they alternate, round by round, and a barrier of MPI begins each round. A round of a small size is a loop of calls, and its
time is divided by their number, for both alike. A time is that of the slowest rank. MPI gets a numpy buffer in place, which is
mpi4py's direct way; the Group gets a tensor, with a wait and a deadline each call. OpenMPI runs with its own settings unless
--mca says otherwise: up to 2 ranks it binds each process, and so the Group's threads, to a core (hwloc_base_binding_policy=none
does not), and it yields by itself when there are more ranks than cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
SIZES = [1 << 10, 64 << 10, 1 << 20, 25 << 20, 100 << 20]
SIDES = ("echelon", "openmpi")


def calls_for(num_bytes: int) -> int:
    """How many calls make up a round."""
    return 100 if num_bytes <= 64 << 10 else 10 if num_bytes <= 1 << 20 else 1


class OverMpi:
    """Where the ranks leave word for each other: rank 0 puts one key, the others get it."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def put(self, key: str, value: bytes) -> None:
        self.comm.bcast((key, value))

    def get(self, key: str, deadline: Any) -> bytes:
        told, value = self.comm.bcast(None)
        assert told == key
        return bytes(value)


def worker(out: Path, rounds: int, sizes: list[int]) -> None:
    import torch
    from mpi4py import MPI

    from echelon import native
    from echelon.clock import Deadline
    from echelon.comm import handover
    from echelon.comm.group import Met
    from echelon.comm.over_native import NativeGroup

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    rank, size = comm.rank, comm.size
    token = comm.bcast(os.urandom(32).hex())
    seat = handover.Seat(rank, size, token, "benchmark")
    core = handover.enter(native.core(), OverMpi(comm), seat, "g", Deadline.after(60))
    group = NativeGroup(core, rank, size, torch.device("cpu"))

    times: dict[str, dict[int, list[float]]] = {side: {} for side in SIDES}
    for num_bytes in sizes:
        x = torch.ones(num_bytes // 4)
        y = torch.ones(num_bytes // 4)
        buffer = y.numpy()
        acts = {
            "echelon": lambda x=x: group.all_reduce(x).wait(Deadline.after(60)),
            "openmpi": lambda buffer=buffer: comm.Allreduce(MPI.IN_PLACE, buffer),
        }
        for act in acts.values():
            act()
        assert torch.all(x == size)
        assert torch.equal(x, y)
        x.zero_()
        y.zero_()
        calls = calls_for(num_bytes)
        mine = torch.zeros(len(acts), rounds, dtype=torch.float64).numpy()
        for number in range(-1, rounds):
            order = list(enumerate(acts.values()))
            for place, act in order if number % 2 else reversed(order):
                comm.Barrier()
                began = time.perf_counter()
                for _ in range(calls):
                    act()
                took = (time.perf_counter() - began) / calls
                if number >= 0:  # the first warms up
                    mine[place, number] = took
        comm.Allreduce(MPI.IN_PLACE, mine, MPI.MAX)
        for place, side in enumerate(SIDES):
            times[side][num_bytes] = mine[place].tolist()
        if rank == 0:
            print(num_bytes, file=sys.stderr, flush=True)
    assert isinstance(group.barrier().wait(Deadline.after(60)), Met)
    group.close()
    if rank == 0:
        version = MPI.Get_library_version().split("\0")[0].split(",")[0]
        found = {"mpi": version, "mpi4py": sys.modules["mpi4py"].__version__, "torch": torch.__version__}  # type: ignore[attr-defined]
        out.write_text(json.dumps({**found, "times_s": times}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument(
        "--mca", action="append", default=[], metavar="NAME=VALUE", help="a setting of OpenMPI"
    )
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    settings = [word for one in asked.mca for word in ("--mca", *one.split("=", 1))]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        subprocess.run(
            ["mpirun", "-n", str(asked.ranks), *root, "--oversubscribe", *settings,
             sys.executable, __file__, "worker", str(out), str(asked.rounds), asked.sizes],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=1800,
        )  # fmt: skip
        found = json.loads(out.read_text())
    report(asked, found)


def report(asked: argparse.Namespace, found: dict[str, Any]) -> None:
    rows = []
    print(
        f"all_reduce, {asked.ranks} ranks on {os.cpu_count()} cores; {found['mpi']}, mpi4py {found['mpi4py']}; ms"
    )
    print(
        f"{'bytes':>10} {'echelon':>9} {'quartiles':>17} {'openmpi':>9} {'quartiles':>17} {'openmpi / ours':>15}"
    )
    for size in asked.sizes.split(","):
        row: dict[str, Any] = {"bytes": int(size), "calls_a_round": calls_for(int(size))}
        line = f"{size:>10}"
        for side in SIDES:
            low, median, high = statistics.quantiles(found["times_s"][side][size], n=4)
            row |= {f"{side}_s": median, f"{side}_quartiles_s": [low, high]}
            line += f" {median * 1e3:>9.4f} {low * 1e3:>8.4f}–{high * 1e3:<8.4f}"
        rows.append(row)
        print(f"{line} {row['openmpi_s'] / row['echelon_s']:>15.2f}")
    if asked.out is None:
        return
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    record = {
        "what": "all_reduce on one host beside OpenMPI",
        "when": datetime.now().isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "ranks": asked.ranks,
        "rounds": asked.rounds,
        "mca": asked.mca,
        "rows": rows,
        **found,
    }
    asked.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(Path(sys.argv[2]), int(sys.argv[3]), [int(size) for size in sys.argv[4].split(",")])
    else:
        main()
