"""For the programs that start a benchmark's workers: a launch a row, the table on the terminal, the file in results/."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import record

from echelon.launch import allocator

LIMIT_S, END_S = 240.0, 15.0
Found = dict[str, object]


@dataclass(frozen=True)
class Row:
    """Launches of a command that leaves FOLDER/times.json (turns.tell); FOLDER stands for a folder of its own, RANK and LAUNCH for numbers."""

    name: str
    command: tuple[str, ...]
    goal: float
    ranks: int = 1
    """So many processes with this command; 1 where it starts its own."""
    launches: int = 1
    """Their rounds count together: where a process's memory comes to lie changes a side's times by some percent for as long as it lives."""


def echelon_run(workers: int, strategy: str, *script: str) -> tuple[str, ...]:
    """The command of a row whose workers `echelon run` starts."""
    begin = (sys.executable, "-m", "echelon", "run", "--workers", str(workers), "--run-dir", "FOLDER/run")
    return (*begin, "--strategy", strategy, *script)


def parser(about: str | None) -> argparse.ArgumentParser:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--rounds", type=int, default=24)
    made.add_argument("--no-file", action="store_true", help="leave nothing in benchmarks/results")
    return made


def measure(row: Row, peer: str = "gloo") -> Found:
    """Blocks for at most LIMIT_S a launch; ends what is left of the ranks then, or when one fails. Ratios are peer / echelon."""
    found: Found = {}
    times: dict[str, list[float]] = {}
    busy: dict[str, list[float]] = {}
    same = True
    for number in range(row.launches):
        found = _launch(row, number)
        if "failed" in found:
            return found
        for told, all_told in ((found.pop("times"), times), (found.pop("busy"), busy)):
            for side, values in told.items():  # type: ignore[attr-defined]
                all_told.setdefault(side, []).extend(values)
        same = same and bool(found["same_losses"])
    return compared(times, busy, peer, row.goal) | found | {"same_losses": same, "launches": row.launches}


def _launch(row: Row, number: int) -> Found:
    env = {
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        **allocator.variables(os.environ),
        "PYTHONPATH": str(record.ROOT),
        "CUDA_VISIBLE_DEVICES": "",
    }  # as the peers: on CPU, and with one allocator
    with tempfile.TemporaryDirectory() as folder:
        out, output = Path(folder) / "times.json", Path(folder) / "output"
        with output.open("wb") as shown:

            def filled(part: str, rank: int) -> str:
                return (
                    part.replace("FOLDER", folder).replace("RANK", str(rank)).replace("LAUNCH", str(number))
                )

            ran = [
                subprocess.Popen([filled(part, rank) for part in row.command],
                                 env=env, stdout=shown, stderr=shown, cwd=record.ROOT)
                for rank in range(row.ranks)
            ]  # fmt: skip
            until = time.monotonic() + LIMIT_S
            try:
                while (
                    any(p.poll() is None for p in ran)
                    and not any(p.poll() for p in ran)
                    and time.monotonic() < until
                ):
                    time.sleep(0.05)
            finally:
                for process in ran:
                    _end(process)
        if not out.exists():
            return {"failed": output.read_text(errors="replace")[-2000:]}
        found: Found = json.loads(out.read_text())
        return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """A run gets the time to end its workers; what is killed is cleaned up after by its guard."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


Times = Mapping[str, Sequence[float]]
"""Seconds a step of each side, by round."""


def compared(times: Times, busy: Times, peer: str, goal: float) -> Found:
    """The verdict on peer / echelon, every side's milliseconds, and the median ratio of each further side."""

    def ratios(side: str) -> list[float]:
        return [theirs / ours for theirs, ours in zip(times[side], times["echelon"], strict=True)]

    others = {
        f"{side}_ratio": statistics.median(ratios(side)) for side in times if side not in (peer, "echelon")
    }
    spent = {f"{side}_ms": 1e3 * statistics.median(values) for side, values in times.items()}
    worked = {f"{side}_busy_ms": 1e3 * statistics.median(values) for side, values in busy.items()}
    return {**record.verdict(ratios(peer), goal), **others, **spent, **worked}


def judged(found: Found) -> str:
    if not found["same_losses"]:
        return "LOSSES DIFFER"
    if found["rounds"] < record.ROUNDS_NEEDED:  # type: ignore[operator]
        return "too few rounds"
    return "met" if found["met"] else "missed"


def table(rows: Sequence[Row], peer: str = "gloo") -> dict[str, Found]:
    """Measures row by row and shows each as soon as it is there."""
    wide = max(len(row.name) for row in rows)
    print(
        f"{'':{wide}} {peer + ' ms':>9} {'ours ms':>9} {'ratio':>6}  quartiles    goal  busy ms: {peer}, ours"
    )
    results = {}
    for row in rows:
        found = results[row.name] = measure(row, peer)
        if "failed" in found:
            print(f"{row.name:{wide}} failed: {str(found['failed'])[-600:]}", flush=True)
            continue
        further = "".join(f"  {name} {value:.2f}" for name, value in found.items() if name.endswith("_ratio"))
        print(f"{row.name:{wide}} {found[f'{peer}_ms']:9.2f} {found['echelon_ms']:9.2f} {found['median']:6.2f}  "
              f"{found['lower']:.2f}–{found['upper']:.2f}  {found['goal']:>6}  {found[f'{peer}_busy_ms']:.1f}, "
              f"{found['echelon_busy_ms']:.1f}  {judged(found)}{further}", flush=True)  # fmt: skip
    return results


def leave(name: str, results: object, asked: argparse.Namespace, **facts: object) -> None:
    """The file, unless it was not asked for."""
    if not asked.no_file:
        path = record.write(name, results, load=os.getloadavg(), **facts)
        print(f"written to {path.relative_to(record.ROOT)}")
