"""`pipeline=3+1` beside even splits, on four workers whose speeds differ 3 : 1 because the kernel gives them no more processor time.

    python benchmarks/uneven_pipeline.py                     about 6 minutes on 2 cores; needs root and a writable cpu control group
    python benchmarks/uneven_pipeline.py --cases fast-3      one case, in a file of its own

A fast worker has half a core, a slow one a sixth, in periods of 20 ms, all its threads together; the sum stays below two cores. Every
case trains 20 equal blocks on the same global batches, each side in turn in one launch:
  echelon              pipeline=3+1, cut where each stage's blocks are in proportion to the speeds of its workers
  even                 data=2,pipeline=2, which the goal is held against: each worker a quarter of the work, two stages, micro-batches as large
  pipeline=4, data=4   further even splits: the same quarter, as four stages, or as plain data parallel (no bubble, the whole model everywhere)
An even split is as fast as its slowest worker: a quarter of the work at speed 1. With all workers busy all the time, the best that any
split can reach beside it is (sum of speeds) / 4 ("limit"): 2.5 with three fast workers, 2.0 with two, 1.5 with one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import beside

CASES = {"fast-3": (3, 3, 3, 1), "fast-2": (3, 1, 1, 3), "fast-1": (1, 1, 1, 3)}
"""Speeds of the workers; the last one is stage 1."""
GOAL = 1.5
CORES = {3: 1 / 2, 1: 1 / 6}
PERIOD_US = 20_000


@contextmanager
def throttles(speeds: tuple[int, ...]) -> Iterator[list[str]]:
    """A control group for each worker, which it enters by writing its pid into the file named here. It gets its time before
    whatever else runs on the machine. Removed at the end."""
    v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    root = Path("/sys/fs/cgroup") if v2 else Path("/sys/fs/cgroup/cpu")
    made: list[Path] = []
    try:
        for rank, speed in enumerate(speeds):
            folder, quota = root / f"echelon-bench-{os.getpid()}-{rank}", int(PERIOD_US * CORES[speed])
            try:
                folder.mkdir()
                made.append(folder)
                if v2:
                    (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
                    (folder / "cpu.weight").write_text("10000")
                else:
                    (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                    (folder / "cpu.cfs_quota_us").write_text(str(quota))
                    (folder / "cpu.shares").write_text("100000")
            except OSError as error:
                sys.exit(f"workers cannot be throttled here: {error}")
        yield [str(folder / "cgroup.procs") for folder in made]
    finally:
        until = time.monotonic() + beside.END_S
        for folder in made:
            while (folder / "cgroup.procs").read_text() and time.monotonic() < until:
                time.sleep(0.1)
            folder.rmdir()


def main() -> None:
    parser = beside.parser(__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--micros", type=int, default=12)
    asked = parser.parse_args()
    worker = str(Path(__file__).with_name("uneven_pipeline_worker.py"))
    results = {}
    for case in asked.cases.split(","):
        speeds = CASES[case]
        with throttles(speeds) as entries:
            script = (worker, "FOLDER", str(asked.rounds), ",".join(map(str, speeds)), *entries)
            command = beside.echelon_run(4, f"microbatches={asked.micros}", *script)
            results |= beside.table([beside.Row(case, command, GOAL)], "even")
        results[case] |= {"speeds": speeds, "limit": sum(speeds) / (len(speeds) * min(speeds))}
    alone = f"-{asked.cases}" if asked.cases in CASES else ""
    beside.leave(
        f"uneven-pipeline{alone}", results, asked, micros=asked.micros, cores_of=CORES, period_us=PERIOD_US
    )


if __name__ == "__main__":
    main()
