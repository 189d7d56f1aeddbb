"""One machine's plan: who runs, with which command, environment and thread count. Nothing is started here."""

from __future__ import annotations

import importlib.machinery
import os
import shlex
import socket
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from echelon import env
from echelon.elastic.hosts import Seat

JOIN_TIMEOUT_S = 60.0
"""How long a worker may take to report to the coordinator; it does so before the script's first line."""


@dataclass(frozen=True)
class Job:
    """What a person asked to run."""

    script: str
    """A path, or a module's name when `module`."""

    args: tuple[str, ...] = ()
    module: bool = False
    num_workers: int = 1

    def again(self, name: str) -> str:
        """The command that goes on with the run of that name."""
        script = [*(["-m"] if self.module else []), self.script, *self.args]
        return shlex.join(["echelon", "run", "--workers", str(self.num_workers), "--resume", name, *script])


@dataclass(frozen=True)
class RoleSpec:
    """One process to start: `env` is laid over the guard's environment, which is the supervisor's less the token."""

    role: str
    rank: int
    argv: tuple[str, ...]
    env: dict[str, str]

    @property
    def id(self) -> str:
        return f"{self.role}-{self.rank}"


@dataclass(frozen=True)
class Plan:
    """The processes of one run on this machine: workers first_rank … first_rank + num_local - 1 of num_workers."""

    name: str
    run_dir: Path
    coordinator: str
    num_workers: int
    num_threads: int
    threads_by_user: bool
    threads_sentence: str
    host: str
    job: Job
    num_local: int
    grace_s: float = 30.0
    """How long a run that is asked to stop may take for its last checkpoint."""

    first_rank: int = 0
    index: int = 0
    """Which host this is; the first is 0."""

    address: str = ""
    """This host's address among several; "" when it is alone."""

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_local)

    @property
    def token_file(self) -> Path:
        """Further hosts have a copy of their own: the folder may be shared."""
        return self.run_dir / ("token" if self.index == 0 else f"token-{self.index}")

    def seated(self, seat: Seat) -> Plan:
        """This plan with the place that a host got among several."""
        threads, sentence = self._threads(seat.num_workers)
        return replace(
            self, num_local=seat.num_workers, first_rank=seat.first_rank, index=seat.index, address=seat.address,
            num_threads=threads, threads_sentence=sentence,
        )  # fmt: skip

    def _threads(self, num_local: int) -> tuple[int, str]:
        return thread_plan(num_local, len(os.sched_getaffinity(0)), env.user_threads())

    def worker(self, rank: int) -> RoleSpec:
        script = (*(("-m",) if self.job.module else ()), self.job.script, *self.job.args)
        argv = (*self._python("worker", rank), "--", *script)
        return self._spec("worker", rank, argv, 0)

    def coordinator_role(self, incarnation: int, listen_fd: int) -> RoleSpec:
        argv = (*self._python("coordinator", 0), "--listen-fd", str(listen_fd))
        return self._spec("coordinator", 0, argv, incarnation)

    def _python(self, role: str, rank: int) -> tuple[str, ...]:
        # -P: the current folder is put on the path by role.py, for the script alone, as plain python would
        return (sys.executable, "-P", "-m", "echelon.role", role, "--rank", str(rank), "--run", self.name)

    def _spec(self, role: str, rank: int, argv: tuple[str, ...], incarnation: int) -> RoleSpec:
        where = env.Place(
            run=self.name, run_dir=self.run_dir, role=role, rank=rank,
            local_rank=rank - self.first_rank if role == "worker" else rank, world_size=self.num_workers,
            coordinator=self.coordinator, incarnation=incarnation, host=self.host, address=self.address,
        )  # fmt: skip
        threads = None if self.threads_by_user else self.num_threads
        there, mine = (
            env.without_token(),
            env.for_process(where, num_threads=threads, token_file=self.token_file),
        )
        overlay = {key: value for key, value in mine.items() if there.get(key) != value} | _import_path()
        return RoleSpec(role, rank, argv, overlay)


def make_plan(job: Job, name: str, run_dir: Path, coordinator: str, grace_s: float = 30.0) -> Plan:
    """The plan of a host that is alone; among several, `seated` gives it its part."""
    by_user = env.user_threads()
    threads, sentence = thread_plan(job.num_workers, len(os.sched_getaffinity(0)), by_user)
    return Plan(
        name=name, run_dir=run_dir, coordinator=coordinator, num_workers=job.num_workers,
        num_threads=threads, threads_by_user=by_user is not None, threads_sentence=sentence,
        host=socket.gethostname().split(".")[0], job=job,
        num_local=job.num_workers, grace_s=grace_s,
    )  # fmt: skip


def thread_plan(num_workers: int, num_cores: int, set_by_user: int | None) -> tuple[int, str]:
    """Threads for each worker, and the sentence that says so. What the user set stays."""
    workers = f"{num_workers} worker{'s' * (num_workers != 1)}"
    if set_by_user is not None:
        return set_by_user, f"{workers} × {_threads(set_by_user)} (OMP_NUM_THREADS)"
    threads = max(1, num_cores // num_workers)
    return threads, f"{workers} × {_threads(threads)} on {num_cores} core{'s' * (num_cores != 1)}"


def count_gpus(dev: Path = Path("/dev")) -> int:
    """NVIDIA devices of this machine, without loading CUDA or torch; CUDA_VISIBLE_DEVICES narrows them."""
    there = sum(1 for path in dev.glob("nvidia[0-9]*") if path.name[6:].isdigit())
    visible = env.visible_gpus()
    return there if visible is None else min(there, visible)


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count != 1)}"


def _import_path() -> dict[str, str]:
    """PYTHONPATH with our own package when only the current folder holds it (a clone that was not installed)."""
    if importlib.machinery.PathFinder.find_spec("echelon", sys.path[1:]) is not None:
        return {}
    return {"PYTHONPATH": env.python_path(str(Path(__file__).resolve().parents[2]))}
