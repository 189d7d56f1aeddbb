"""From what a person typed to a running supervisor: everything that can be wrong is found before anything starts."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.machinery
import io
import socket
import sys
import time
from pathlib import Path
from typing import Any

from echelon import strategy as strategies
from echelon.errors import UsageError
from echelon.launch import again, rundir
from echelon.launch.local import Job, make_plan
from echelon.launch.rundir import RunDir
from echelon.show import tensorboard
from echelon.show.lines import fold
from echelon.show.progress import Display
from echelon.strategy import Strategy


def check_script(job: Job) -> None:
    """UsageError with the nearest file name when the script or module is not there."""
    path = Path(job.script)
    if job.module:
        top = job.script.partition(".")[0]
        if (
            importlib.machinery.PathFinder.find_spec(top, ["", *sys.path]) is None
            and top not in sys.builtin_module_names
        ):
            raise UsageError(
                f"there is no module {top!r}", remedy="It is looked for here and where python looks."
            )
        return
    if path.is_file() or (path / "__main__.py").is_file():
        return
    folder = path.parent if path.parent.is_dir() else Path()
    stems = {p.stem: p for p in folder.glob("*.py")}
    near = difflib.get_close_matches(path.stem, list(stems), n=1)
    remedy = f"Did you mean {stems[near[0]]}?" if near else f"The current folder is {Path.cwd()}."
    what = "is a folder without __main__.py" if path.is_dir() else "does not exist"
    raise UsageError(f"the script {job.script!r} {what}", remedy=remedy)


def choose_strategy(
    text: str, settings: tuple[str, ...], config: Path | None
) -> tuple[Strategy, dict[str, Any]]:
    """The strategy and the fields that the person set, highest first: --set, --strategy, --config."""
    layers = [
        strategies.parse_set(settings),
        strategies.parse(text),
        strategies.load(config) if config is not None else {},
    ]
    chosen = strategies.merge(*layers)
    strategies.require_built(chosen)
    if chosen.tensorboard:
        tensorboard.require()
    return chosen, layers[2] | layers[1] | layers[0]


def run(
    job: Job,
    chosen: Strategy,
    set_by_user: dict[str, Any],
    *,
    name: str | None,
    run_dir: Path | None,
    resume: str | None = None,
    grace_s: float = 30.0,
) -> int:
    """Makes the run's folder (or goes on in an old one), runs it to its end, gives its exit code. Blocks."""
    from echelon.launch.supervisor import Supervisor

    check_script(job)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end a run
    now = time.time()
    goes_on = again.choose(resume, job, name, run_dir)
    record: dict[str, Any] = {}
    if goes_on is not None and goes_on.folder is not None:
        folder = goes_on.folder
        name, before = folder.name, folder.read()
        record = {"started": before.get("started", now), "restarts": [*before.get("restarts", []), now]}
        rundir.reopen(folder)
    else:
        name, folder = rundir.create(job.script, name=name, run_dir=run_dir, now=now)
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        plan = make_plan(job, name, folder.path, listening.getsockname()[1], grace_s)
        folder.write({
            "name": name, "script": job.script, "module": job.module, "args": list(job.args),
            "strategy": dataclasses.asdict(chosen), "set_by_user": set_by_user, "num_workers": job.num_workers,
            "num_threads": plan.num_threads, "started": now, "host": plan.host, "python": sys.executable,
            "coordinator": plan.coordinator, "grace_s": grace_s,
            "resume": goes_on.described() if goes_on is not None else None, **record,
        })  # fmt: skip
        display = Display(num_workers=job.num_workers, host=plan.host, own_prints=False, starting=True)
        display.say(*fold(f"run {name} · {plan.threads_sentence} · {chosen}"))
        board = tensorboard.TensorBoard(folder.path / "tensorboard", wanted=chosen.tensorboard)
        with contextlib.closing(board):
            return Supervisor(plan, folder, listening, display, [board]).run()


def state_of(folder: RunDir) -> str:
    """How a run stands: running, ended, stopped (code), failed (code), or died (its supervisor is gone without a word)."""
    record = folder.read()
    if "code" in record:
        code = record["code"]
        word = {75: "preempted", 124: "stuck", 129: "stopped", 130: "stopped", 143: "stopped"}.get(
            code, "failed"
        )
        return "ended" if code == 0 else f"{word} ({code})"
    supervisors = [process for process in folder.load_processes() if process.role == "supervisor"]
    if not supervisors:
        return "died"
    if supervisors[0].host != socket.gethostname().split(".")[0]:
        return f"on {supervisors[0].host}"
    return "running" if supervisors[0].alive else "died"
