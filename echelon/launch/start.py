"""From what a person typed to a running supervisor: everything that can be wrong is found before anything starts."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.machinery
import io
import shlex
import socket
import sys
import time
from pathlib import Path
from typing import Any

from echelon import demands, env, preload
from echelon import strategy as strategies
from echelon.control import net
from echelon.control import token as tokens
from echelon.errors import UsageError
from echelon.launch import again, allocator, listen, rundir, sameness
from echelon.launch.crew import JOIN_S, Crew
from echelon.launch.local import Job, make_plan, strategy_options
from echelon.launch.meeting import Me
from echelon.launch.rundir import RunDir
from echelon.mesh.axes import laid
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


def check_size(job: Job, chosen: Strategy) -> None:
    """StrategyError where so many workers and servers cannot do this."""
    strategies.require_servers(chosen, job.num_servers)
    demands.workers(chosen, job.num_workers)
    laid(job.num_workers, 0, chosen.widths, chosen.tensor)  # whatever axes the script adds


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
    demands.wide(chosen)
    if chosen.tensorboard:
        tensorboard.require()
    return chosen, layers[2] | layers[1] | layers[0]


@dataclasses.dataclass(frozen=True)
class Reach:
    """How many hosts take part, where the first one listens, and how long it waits for the others."""

    num_hosts: int = 1
    listen: str | None = None
    join_timeout_s: float = JOIN_S


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a run goes on from (None: nothing), and how long it may take to save when it is asked to stop."""

    resume: str | None = None
    grace_s: float = 30.0


def run(
    job: Job, chosen: Strategy, set_by_user: dict[str, Any], *, name: str | None, run_dir: Path | None,
    reach: Reach = Reach(), kept: Kept = Kept(),
) -> int:  # fmt: skip
    """Makes the run's folder (or goes on in an old one), runs it to its end, gives its exit code. Blocks."""
    from echelon.launch.supervisor import Supervisor

    check_script(job)
    check_size(job, chosen)
    imports, malloc = preload.imports(chosen), allocator.variables(env.everything())
    if job.num_workers + job.num_servers < reach.num_hosts:
        raise UsageError(f"{job.num_workers} workers cannot run on {reach.num_hosts} hosts: each has at least one",
                         remedy="--workers is the total of all hosts. A host that joins with --workers 0 is for servers.")  # fmt: skip
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end a run
    now, given = time.time(), env.take_token()
    token = tokens.check(given) if given is not None else None
    address, port = listen.choose(reach.listen, reach.num_hosts)
    goes_on = again.choose(kept.resume, job, name, run_dir)
    with listen.open_socket(address, port) as listening:
        name, folder, record = _folder(job, goes_on, name, run_dir, now)
        plan = make_plan(job, name, folder.path, net.spell(address, listening.getsockname()[1]), kept.grace_s,
                         job.again(name, strategy_options(set_by_user)), imports, malloc)  # fmt: skip
        folder.write({
            "name": name, "script": job.script, "module": job.module, "args": list(job.args),
            "strategy": dataclasses.asdict(chosen), "set_by_user": set_by_user, "num_workers": job.num_workers,
            "num_servers": job.num_servers, "num_threads": plan.num_threads, "started": now, "host": plan.host, "python": sys.executable,
            "coordinator": plan.coordinator, "num_hosts": reach.num_hosts, "cwd": str(Path.cwd()),
            "script_sha256": sameness.sha256(sameness.file_of(job, Path.cwd())), "version": sameness.version(),
            "grace_s": kept.grace_s, "resume": goes_on.described() if goes_on is not None else None, **record,
        })  # fmt: skip
        display = Display(num_workers=job.num_workers, num_servers=job.num_servers, host=plan.host, own_prints=False,
                          starting=True)  # fmt: skip
        folder.tell = lambda words: display.say(*fold(words))
        servers = f" + {job.num_servers} server{'s' * (job.num_servers != 1)}" if job.num_servers else ""
        threads = (
            plan.threads_sentence
            if reach.num_hosts == 1
            else f"{job.num_workers} workers{servers} on {reach.num_hosts} hosts"
        )
        display.say(*fold(f"run {name} · {threads} · {chosen}"))
        if faster := allocator.hint(malloc):
            display.say(*fold(faster))
        if reach.num_hosts > 1:  # which workers run here is known when all hosts are there
            plan = dataclasses.replace(plan, num_local=0, num_local_servers=0)
        crew = Crew(reach.num_hosts, Me(plan.host, address), reach.join_timeout_s)
        if crew.several:
            given_out = token is not None
            crew.invitation = invitation(plan.coordinator, net.interface_of(address), folder.token, given_out)
        board = tensorboard.TensorBoard(folder.path / "tensorboard", wanted=chosen.tensorboard)
        with contextlib.closing(board):
            return Supervisor(plan, folder, listening, display, [board], crew, token).run()


def invitation(coordinator: str, interface: str, token: Path, given: bool) -> list[str]:
    """What the first host tells people to type on the others. The token itself is never shown. Pure."""
    how = (
        ["ECHELON_TOKEN must be set there as it is here."]
        if given
        else [f"The token is in {token} (mode 0600): copy it there, for example with scp -p,",
              "or set ECHELON_TOKEN there to what is in it."]
    )  # fmt: skip
    file = "" if given else f" --token-file {shlex.quote(str(token))}"
    return [
        "on every other host, in the folder of the script:",
        f"  echelon join {coordinator}{file}",
        *(f"  {line}" for line in how),
        *fold(f"control on {coordinator} ({interface}) and the workers' streams between hosts, on ports that the kernel chooses, "
              "ask for the token; gloo's and NCCL's, where they are used, ask for nothing: keep this network private"),
    ]  # fmt: skip


def _folder(
    job: Job, goes_on: again.Again | None, name: str | None, run_dir: Path | None, now: float
) -> tuple[str, RunDir, dict[str, Any]]:
    """The run's name and folder, made or opened again, and what its record keeps of before."""
    if goes_on is None or goes_on.folder is None:
        return *rundir.create(job.script, name=name, run_dir=run_dir, now=now), {}
    folder = goes_on.folder
    known, before = folder.name, folder.read()
    rundir.reopen(folder)
    record = {"started": before.get("started", now), "restarts": [*before.get("restarts", []), now]}
    return known, folder, record


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
