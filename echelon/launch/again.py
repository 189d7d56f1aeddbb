"""`--resume [RUN]`: which run is meant, in which folder it goes on, and where its checkpoints are looked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon import env
from echelon.errors import UsageError
from echelon.launch import rundir
from echelon.launch.local import Job
from echelon.launch.rundir import RunDir


@dataclass(frozen=True)
class Again:
    """What a resumed run goes on from."""

    folder: RunDir | None
    """The run that goes on, in its own folder; None: a new run starts from `source`."""

    source: str
    """A checkpoint, or a folder or URL of checkpoints; "" for the run's own."""

    must: bool
    """Without a complete checkpoint: an error, or a start from the beginning."""

    def described(self) -> dict[str, Any]:
        return {"source": self.source, "must": self.must}


def choose(asked: str | None, job: Job, name: str | None, run_dir: Path | None) -> Again | None:
    """From what a person typed; None when nothing is to be resumed.

    --resume alone goes on with the run of --name or --run-dir (or begins it, so that one command line serves a job that
    is started again and again), else with the newest run of this script that has a checkpoint.
    """
    if asked is None:
        return None
    named = _existing(name, run_dir)
    if asked == "":
        if name is not None or run_dir is not None:
            return Again(_idle(named), "", must=False)
        return Again(_idle(_newest(job)), "", must=True)
    if "://" in asked or (Path(asked) / "manifest.json").exists():
        return Again(_idle(named), asked, must=True)
    found = rundir.find(asked)
    if (name is None and run_dir is None) or (named is not None and named.path == found.path):
        return Again(_idle(found), "", must=True)
    return Again(_idle(named), str(found.path), must=True)


def _existing(name: str | None, run_dir: Path | None) -> RunDir | None:
    path = run_dir if run_dir is not None else env.runs_dir() / name if name is not None else None
    return RunDir(path.resolve()) if path is not None and (path / "run.json").exists() else None


def _newest(job: Job) -> RunDir:
    mine = [
        run
        for run in rundir.every()
        if (run.read().get("script"), run.read().get("module")) == (job.script, job.module)
    ]
    saved = [run for run in mine if _has_checkpoint(run)]
    if saved:
        return saved[-1]
    raise UsageError(
        f"--resume: no run of {job.script} in {env.runs_dir()} has a complete checkpoint"
        + (f" ({len(mine)} run{'s' * (len(mine) != 1)} without one)" if mine else ""),
        remedy="Name a run, a checkpoint folder or a URL: --resume=RUN; or start without --resume.",
    )


def _has_checkpoint(run: RunDir) -> bool:
    elsewhere = run.read().get("strategy", {}).get("checkpoint_dir")
    return bool(elsewhere) or any(run.path.glob("checkpoints/step-*/manifest.json"))


def _idle(run: RunDir | None) -> RunDir | None:
    supervisors = [p for p in run.load_processes() if p.role == "supervisor"] if run is not None else []
    if run is not None and "code" not in run.read() and any(p.alive for p in supervisors):
        raise UsageError(
            f"run {run.name} is still running (pid {supervisors[0].pid})",
            remedy=f"End it first: `echelon stop {run.name}`; or start a new run from its checkpoint with another --name.",
        )
    return run


def spelled(args: Sequence[str]) -> list[str]:
    """The command line with `--resume` as `--resume=…`: what follows it is RUN only if it can be one, and not the script."""
    out, rest = [], list(args)
    while rest:
        word = rest.pop(0)
        if word != "--resume":
            out.append(word)
            if not word.startswith("-") and not (
                len(out) > 1 and out[-2].startswith("--") and "=" not in out[-2]
            ):
                return [*out, *rest]  # the script: what follows is its own
            continue
        takes = bool(rest) and not rest[0].startswith("-") and _may_be_run(rest[0], rest[1:])
        out.append(f"--resume={rest.pop(0)}" if takes else "--resume=")
    return out


def _may_be_run(word: str, rest: list[str]) -> bool:
    if "://" in word:
        return True
    if Path(word).is_file():
        return False
    try:
        rundir.find(word)
        return True
    except UsageError:
        return Path(word).is_dir() or (bool(rest) and (rest[0].startswith("-") or Path(rest[0]).is_file()))
