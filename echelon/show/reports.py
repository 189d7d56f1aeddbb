"""What `echelon runs`, `status` and `logs` say, read from run folders alone: it works after a crash as well."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from echelon.errors import UsageError
from echelon.events import Beat, Serving
from echelon.launch import rundir
from echelon.launch.rundir import RunDir
from echelon.launch.start import state_of
from echelon.show.lines import fold
from echelon.show.state import duration, number
from echelon.show.summary import MEASURED, dealt, measured, skipped, staleness, work_of

FOLLOW_S = 0.2
EVENTS_TAIL_BYTES = 4 << 20
SERVED = (
    "updates",
    "sums",
    "bytes_in",
    "bytes_out",
    "busy_s",
    "stale",
    "behind",
    "dropped",
    "returned",
    "skipped",
)
"""What `status` tells of a server, as in the event Serving."""


def runs_table() -> list[str]:
    """A line for each run."""
    rows = [["NAME", "STATE", "STARTED", "TIME", "WORKERS", "STEPS"]]
    for folder in rundir.every():
        record = folder.read()
        state, started = state_of(folder), float(record.get("started", 0.0))
        servers = f"+{record['num_servers']}" if record.get("num_servers") else ""
        until = record.get("ended") or (time.time() if state == "running" else None)
        rows.append([
            folder.path.name, state, time.strftime("%Y-%m-%d %H:%M", time.localtime(started)),
            duration(until - started) if until else "-", f"{record.get('num_workers', '-')}{servers}",
            str(record.get("steps", "-")),
        ])  # fmt: skip
    if len(rows) == 1:
        return ["no runs yet: start one with `echelon run train.py`"]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def status(folder: RunDir) -> dict[str, Any]:
    """Everything known of a run, as values for JSON."""
    record = folder.read()
    steps: dict[int, dict[str, Any]] = {}
    servers: dict[int, dict[str, Any]] = {}
    metrics: dict[str, float] = dict(record.get("metrics") or {})
    failures = []
    pauses = []
    skips: dict[int, int] = {}
    for event in _events(folder.events):
        if event.get("event") == "Beat" and event.get("rank") is not None:
            steps[event["rank"]] = event
        elif event.get("event") == "Serving" and event.get("rank") is not None:
            servers[event["rank"]] = event
        elif event.get("event") == "Left":
            steps.setdefault(event["rank"], {})["step"] = event["step"]
        elif event.get("event") == "Metric" and "ended" not in record:
            metrics |= event["values"]
        elif event.get("event") == "UpdateSkipped" and event.get("rank") is not None:
            skips[event["rank"]] = int(event["total"])
        elif event.get("event") == "WorkersBack":
            pauses.append(float(event["pause_s"]))
        elif event.get("event") == "Failed":
            told = {key: event[key] for key in ("rank", "host", "step", "code", "error", "consequence")}
            failures.append({"role": event.get("role", "worker"), **told})
    processes = []
    for process in folder.load_processes():
        beat = {"worker": steps, "server": servers}.get(process.role, {}).get(process.rank, {})
        processes.append({
            "role": process.role, "rank": process.rank, "host": process.host, "pid": process.pid,
            "alive": process.alive, "code": process.code, "step": beat.get("step"), "doing": beat.get("doing") or "",
            "peak_rss_bytes": beat.get("peak_rss_bytes", 0), "incarnation": process.incarnation,
            **{key: beat[key] for key in SERVED if process.role == "server" and key in beat},
            **{key: beat[key] for key in MEASURED if beat.get(key) is not None},
            **({"waiting": waited} if process.role == "worker" and (waited := _waited(beat)) is not None else {}),
        })  # fmt: skip
    known = (
        "name",
        "script",
        "module",
        "args",
        "num_workers",
        "num_servers",
        "num_threads",
        "set_by_user",
        "started",
        "ended",
        "code",
    )
    return {key: record[key] for key in known if key in record} | {
        "state": state_of(folder), "run_dir": str(folder.path), "metrics": metrics, "processes": processes,
        "failures": failures, "pauses_s": pauses, "skipped": sum(skips.values()),
    }  # fmt: skip


def _waited(beat: dict[str, Any]) -> float | None:
    """The share of its time that a worker waited for others."""
    return round(beat["wait_s"] / beat["total_s"], 4) if beat.get("total_s") and "wait_s" in beat else None


def _workers(report: dict[str, Any]) -> dict[int, Beat]:
    return {
        process["rank"]: Beat(**{key: process[key] for key in MEASURED if key in process})
        for process in report["processes"]
        if process["role"] == "worker"
    }


def _served(report: dict[str, Any]) -> list[str]:
    """What servers did, and how far behind gradients were."""
    told = {
        process["rank"]: Serving(**{key: process[key] for key in SERVED if key in process})
        for process in report["processes"]
        if process["role"] == "server"
    }
    said = [f"server {rank}: {', '.join(did)}" for rank, one in told.items() if (did := work_of(one))]
    lines = fold("  " + " · ".join(said)) if said else []
    lines += staleness(told.values())
    return lines + (fold("  " + again) if (again := dealt(told.values())) else [])


def status_lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    args = " ".join(report.get("args", []))
    lines = [
        f"run {report['name']}: {report['state']}",
        f"  script {'-m ' if report.get('module') else ''}{report['script']} {args}".rstrip(),
        f"  folder {report['run_dir']}",
    ]
    if report["metrics"]:
        lines += fold(
            "  last " + ", ".join(f"{name} {number(value)}" for name, value in report["metrics"].items())
        )
    names = {process["host"] for process in report["processes"]}

    def on(process: dict[str, Any]) -> str:
        return f"on {process['host']} " * (len(names) > 1)

    for process in report["processes"]:
        name = f"{process['role']} {process['rank']}"
        state = (
            "alive"
            if process["alive"]
            else f"exit code {process['code']}"
            if process["code"] is not None
            else "gone"
        )
        served = process["role"] == "server" and not process["step"]
        step = f", step {process['step']}" if process["step"] is not None and not served else ""
        doing = f", {process['doing']}" if process["doing"] and process["alive"] else ""
        times = process["incarnation"]
        again = f", started again {times} time{'s' * (times != 1)}" if times else ""
        waits = f", waiting {process['waiting']:.0%}" if "waiting" in process else ""
        lines.append(f"  {name:<14} {on(process)}pid {process['pid']:<8} {state}{step}{doing}{waits}{again}")
    lines += measured(_workers(report))
    lines += _served(report)
    lines += skipped(report["skipped"])
    if report["pauses_s"]:
        stood = f"{sum(report['pauses_s']):.1f} s in all, {max(report['pauses_s']):.1f} s at most"
        lines.append(f"  stood still for workers that were started again: {stood}")
    lines += [f"  {f['role']} {f['rank']} failed at step {f['step']}: {f['error']}"
              for f in report["failures"] if not f["consequence"]]  # fmt: skip
    return lines


def log(folder: RunDir, role: str, rank: int, *, follow: bool) -> Iterator[bytes]:
    """The bytes of a log; with `follow` until the run is over. UsageError that names the logs there are."""
    path = folder.log(role, rank)
    if not path.exists():
        there = ", ".join(sorted(p.stem for p in folder.logs.glob("*.log"))) or "none"
        far = [p for p in folder.load_processes() if (p.role, p.rank) == (role, rank) and p.elsewhere]
        where = (
            f" It runs on {far[0].host}: its log is there, in logs/{path.name} of the run's folder."
            if far
            else ""
        )
        raise UsageError(
            f"run {folder.name} has no log of {role} {rank} here", remedy=f"There are: {there}.{where}"
        )
    return _pieces(folder, path, follow)


def _pieces(folder: RunDir, path: Path, follow: bool) -> Iterator[bytes]:
    with path.open("rb") as file:
        while True:
            over = not follow or state_of(folder) != "running"
            while piece := file.read(1 << 16):
                yield piece
            if over:
                return
            time.sleep(FOLLOW_S)  # a pace for polling a file, nobody is waited for


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The last events of a run; a line that is torn or not ours is skipped."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - EVENTS_TAIL_BYTES)
            file.seek(start)
            if start:
                file.readline()
            for line in file:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict):
                    yield record
    except OSError:
        return
