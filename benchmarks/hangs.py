"""Does the alarm name the right worker and the right kind, in time, and only then? Hangs injected into real runs.

    python benchmarks/hangs.py inject [--number 40] [--seed N] [--at-once 4]
    python benchmarks/hangs.py quiet [--minutes 20] [--seed N]

Leaves a file in benchmarks/results/. The dead link is not among them: it needs network namespaces (tests/flows).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORKER = ROOT / "benchmarks" / "hang_worker.py"
KINDS = {
    "getitem": "data", "loader": "data", "stop": "stopped", "gil": "silent", "spin": "busy", "sleep": "asleep",
    "extra": "mismatch", "barrier": "mismatch", "different": "mismatch", "left": "absent",
}  # fmt: skip
"""How a worker hangs -> the kind that the alarm must name."""

LIMIT_S = {"mismatch": 10.0, "absent": 10.0}
USUAL_LIMIT_S = 15.0
"""max(3 × step, 10 s) + 5 s, with steps of a twentieth of a second."""


def run(folder: Path, workers: int, *args: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ECHELON_RUNS": str(folder / "runs")}
    command = [sys.executable, "-m", "echelon", "run", "--workers", str(workers), "--set", "stuck_s=1",
               "--run-dir", str(folder / "run"), str(WORKER), *args]  # fmt: skip
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s
    )


def alarms(folder: Path) -> list[dict]:
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == "Stuck"]


def inject(number: int, kind: str, rank: int, workers: int, step: int) -> dict[str, object]:
    """One run with one hang, judged."""
    case: dict[str, object] = {"hang": kind, "rank": rank, "workers": workers, "step": step}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        done = run(folder, workers, kind, str(rank), str(step), timeout_s=300)
        heard = alarms(folder)
        logs = "".join(path.read_text() for path in sorted((folder / "run" / "logs").glob("worker-*.log")))
    began = [float(text) for text in re.findall(r"hang begins ([\d.]+)", logs)]
    if not heard or not began:
        return case | {
            "right": False,
            "why": f"no alarm; exit code {done.returncode}",
            "tail": done.stderr[-500:],
        }
    told, want = heard[0], KINDS[kind]
    after_s = told["time"] - max(began)
    culprit = rank in told["ranks"] if want == "mismatch" else told["rank"] == rank
    sites = sum("hang_worker.py" in line for line in told["others"]) >= (2 if want == "mismatch" else 1)
    stack = (
        want == "mismatch" or want == "absent" or any("hang_worker.py" in frame for frame in told["stack"])
    )
    timely = after_s <= LIMIT_S.get(want, USUAL_LIMIT_S)
    wrong = [
        word
        for word, ok in (
            (f"kind {told['kind']}", told["kind"] == want), (f"culprit {told['rank']} {told['ranks']}", culprit),
            (f"late: {after_s:.1f} s", timely), ("sites", sites), ("stack", stack),
            (f"exit code {done.returncode}", done.returncode == 124), ("several alarms", len(heard) == 1),
        )
        if not ok
    ]  # fmt: skip
    case |= {"kind": told["kind"], "after_s": round(after_s, 1), "right": not wrong, "why": ", ".join(wrong)}
    shown = ("rank", "reason", "step", "age_s", "stack", "others")
    return case if not wrong else case | {"alarm": {name: told[name] for name in shown}}


def injections(number: int, seed: int, at_once: int) -> dict[str, object]:
    """Every kind in turn, at random steps, in random workers of 2 or 3."""
    chance, cases = random.Random(seed), []
    for i in range(number):
        workers = chance.choice((2, 2, 3))
        kind = list(KINDS)[i % len(KINDS)]
        cases.append((i, kind, chance.randrange(workers), workers, chance.randrange(3, 60)))
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        found = []
        for result in pool.map(lambda case: inject(*case), cases):
            found.append(result)
            print(json.dumps(result), flush=True)
    right = sum(bool(case["right"]) for case in found)
    named = sum(case.get("kind") == KINDS[str(case["hang"])] for case in found)
    print(f"{right} of {len(found)} right in everything, {named} with the right kind (seed {seed})")
    return {"seed": seed, "right": right, "right_kind": named, "of": len(found), "cases": found}


def quietness(minutes: float, seed: int) -> dict[str, object]:
    """A run that is uneven and not stuck: nothing may be said."""
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.monotonic()
        done = run(folder, 2, "quiet", str(minutes * 60), str(seed), timeout_s=minutes * 60 + 300)
        heard = alarms(folder)
        steps = re.search(r"quiet for (\d+) steps", done.stdout)
    found = {"seed": seed, "minutes": round((time.monotonic() - began) / 60, 1), "code": done.returncode,
             "steps": int(steps[1]) if steps else None, "alarms": heard}  # fmt: skip
    print(json.dumps(found, indent=1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("inject", "quiet"))
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--at-once", type=int, default=4)
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    if asked.what == "inject":
        results = injections(asked.number, asked.seed, asked.at_once)
    else:
        results = quietness(asked.minutes, asked.seed)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    record = {
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
        "commit": commit,
        "cores": os.cpu_count(),
        "results": results,
    }
    path = (
        ROOT
        / "benchmarks"
        / "results"
        / f"{datetime.now():%Y-%m-%d}-hangs-{asked.what}-{os.cpu_count()}cores.json"
    )
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
