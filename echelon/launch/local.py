"""One machine's plan: who runs, with which command, environment and thread count. Nothing is started here."""

from __future__ import annotations

import importlib.machinery
import os
import shlex
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from echelon import env
from echelon.control.roster import SERVER, WORKER, Who
from echelon.elastic.hosts import Seat
from echelon.launch.guard import PASSED_FD

JOIN_TIMEOUT_S = 60.0
"""How long a worker may take to report to the coordinator; it does so before the script's first line."""

SPARE_BYTES = 4096
"""Room of a fork server beyond what the longest of its roles needs to show."""


@dataclass(frozen=True)
class Job:
    """What a person asked to run."""

    script: str
    """A path, or a module's name when `module`."""

    args: tuple[str, ...] = ()
    module: bool = False
    num_workers: int = 1
    num_servers: int = 0

    def again(self, name: str, strategy: Sequence[str] = ()) -> str:
        """The command that goes on with the run of that name; `strategy` are the options that say how it trains."""
        script = [*(["-m"] if self.module else []), self.script, *self.args]
        servers = ["--servers", str(self.num_servers)] if self.num_servers else []
        options = ["--workers", str(self.num_workers), *servers, *strategy, "--resume", name]
        return shlex.join(["echelon", "run", *options, *script])


def strategy_options(fields: Mapping[str, Any]) -> list[str]:
    """What a person typed of a strategy, as options; [] for nothing. What holds a comma needs a --set of its own."""
    spelled = {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in fields.items() if k != "form"}
    words = [*([str(fields["form"])] if "form" in fields else [])]
    words += [f"{k}={v}" for k, v in spelled.items() if "," not in v]
    apart = [word for k, v in spelled.items() if "," in v for word in ("--set", f"{k}={v}")]
    return [*(["--strategy", ",".join(words)] if words else []), *apart]


@dataclass(frozen=True)
class Program:
    """A command line, and what is laid over the guard's environment, which is the supervisor's less the token."""

    argv: tuple[str, ...]
    env: dict[str, str]


@dataclass(frozen=True)
class RoleSpec:
    """One process to start: `env` is laid over the guard's environment, as a Program's is."""

    role: str
    rank: int
    argv: tuple[str, ...]
    env: dict[str, str]
    incarnation: int = 0
    fork_server: Program | None = None
    """The process that is to fork it; None for a Python of its own."""

    @property
    def id(self) -> str:
        return f"{self.role}-{self.rank}"


@dataclass(frozen=True)
class Plan:
    """The processes of one run on this machine: workers first_rank … first_rank + num_local - 1 of num_workers, and
    servers first_server … first_server + num_local_servers - 1."""

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

    first_server: int = 0
    num_local_servers: int = 0
    num_server_threads: int = 1
    again: str = ""
    """The command that goes on with this run."""

    imports: tuple[str, ...] = ()
    """What one process imports, which then forks this host's workers and servers; () for each of them a Python of its own."""

    allocator: Mapping[str, str] = field(default_factory=dict)
    """Variables that give workers and servers their C allocator."""

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_local)

    @property
    def servers(self) -> range:
        return range(self.first_server, self.first_server + self.num_local_servers)

    @property
    def num_servers(self) -> int:
        return self.job.num_servers

    @property
    def everybody(self) -> list[Who]:
        """All workers and servers of the run, on whatever host."""
        workers = [Who(WORKER, rank) for rank in range(self.num_workers)]
        return [*workers, *(Who(SERVER, rank) for rank in range(self.num_servers))]

    @property
    def mine(self) -> list[Who]:
        """Those that run here, servers first: workers look for them."""
        return [*(Who(SERVER, rank) for rank in self.servers), *(Who(WORKER, rank) for rank in self.ranks)]

    def is_here(self, who: Who) -> bool:
        return who.rank in (self.servers if who.role == SERVER else self.ranks)

    @property
    def token_file(self) -> Path:
        """Further hosts have a copy of their own: the folder may be shared."""
        return self.run_dir / ("token" if self.index == 0 else f"token-{self.index}")

    def seated(self, seat: Seat) -> Plan:
        """This plan with the place that a host got among several."""
        threads, of_servers, sentence = _threads_here(seat.num_workers, seat.num_servers)
        return replace(
            self, num_local=seat.num_workers, first_rank=seat.first_rank, index=seat.index, address=seat.address,
            num_threads=threads, threads_sentence=sentence, num_server_threads=of_servers,
            first_server=seat.first_server, num_local_servers=seat.num_servers,
        )  # fmt: skip

    def role(self, who: Who, incarnation: int = 0) -> RoleSpec:
        """A worker or server; a higher incarnation takes the place of one that ended."""
        spec = self._spec(who.role, who.rank, self._command(who), incarnation)
        return spec if not self.imports else replace(spec, fork_server=self._fork_server())

    def _command(self, who: Who) -> tuple[str, ...]:
        argv = self._python(who.role, who.rank)
        if who.role != WORKER:
            return argv
        return (*argv, "--", *(("-m",) if self.job.module else ()), self.job.script, *self.job.args)

    def _fork_server(self) -> Program:
        """It has room for the command line and the environment of every role of this host."""
        specs = [self._spec(who.role, who.rank, self._command(who), 0) for who in self.mine]
        libraries = env.for_libraries(None if self.threads_by_user else self.num_threads)
        room = max(_size(spec.argv) for spec in specs) + SPARE_BYTES
        argv = (sys.executable, "-P", "-m", "echelon.role", "forkserver",
                "--socket-fd", str(PASSED_FD), "--imports", *self.imports, "--room", "." * room)  # fmt: skip
        more = (
            max(_size(f"{name}={value}" for name, value in spec.env.items()) for spec in specs) + SPARE_BYTES
        )
        return Program(argv, {**_import_path(), **libraries, **self.allocator, env.ROOM: "." * more})

    def coordinator_role(self, incarnation: int, listen_fd: int) -> RoleSpec:
        argv = (*self._python("coordinator", 0), "--listen-fd", str(listen_fd))
        return self._spec("coordinator", 0, argv, incarnation)

    def _python(self, role: str, rank: int) -> tuple[str, ...]:
        # -P: the current folder is put on the path by role.py, for the script alone, as plain python would
        return (sys.executable, "-P", "-m", "echelon.role", role, "--rank", str(rank), "--run", self.name)

    def _spec(self, role: str, rank: int, argv: tuple[str, ...], incarnation: int) -> RoleSpec:
        where = env.Place(
            run=self.name, run_dir=self.run_dir, role=role, rank=rank,
            local_rank=rank - {WORKER: self.first_rank, SERVER: self.first_server}.get(role, 0), world_size=self.num_workers,
            coordinator=self.coordinator, incarnation=incarnation, host=self.host, address=self.address,
        )  # fmt: skip
        threads = self.num_server_threads if role == SERVER else self.num_threads
        there, mine = (
            env.without_token(),
            env.for_process(
                where, num_threads=None if self.threads_by_user else threads, token_file=self.token_file
            ),
        )
        overlay = {key: value for key, value in mine.items() if there.get(key) != value} | _import_path()
        if role in (WORKER, SERVER):
            overlay |= env.laid(self.allocator)
        return RoleSpec(role, rank, argv, overlay, incarnation)


def make_plan(
    job: Job, name: str, run_dir: Path, coordinator: str, grace_s: float = 30.0, again: str = "",
    imports: Sequence[str] = (), malloc: Mapping[str, str] = MappingProxyType({}),
) -> Plan:  # fmt: skip
    """The plan of a host that is alone; among several, `seated` gives it its part."""
    threads, of_servers, sentence = _threads_here(job.num_workers, job.num_servers)
    return Plan(
        name=name, run_dir=run_dir, coordinator=coordinator, num_workers=job.num_workers,
        num_threads=threads, threads_by_user=env.user_threads() is not None, threads_sentence=sentence,
        host=socket.gethostname().split(".")[0], job=job,
        num_local=job.num_workers, grace_s=grace_s,
        num_local_servers=job.num_servers, num_server_threads=of_servers, again=again or job.again(name),
        imports=tuple(imports), allocator=malloc,
    )  # fmt: skip


def _threads_here(num_workers: int, num_servers: int) -> tuple[int, int, str]:
    """Threads of a worker, of a server, and the sentence about both, on this machine."""
    num_cores, by_user = len(os.sched_getaffinity(0)), env.user_threads()
    of_servers = by_user or server_threads(num_workers, num_servers, num_cores)
    threads, sentence = thread_plan(num_workers, num_cores, by_user, num_servers)
    return threads, of_servers, sentence


def thread_plan(
    num_workers: int, num_cores: int, set_by_user: int | None, num_servers: int = 0
) -> tuple[int, str]:
    """Threads for each worker, and the sentence that says so. What the user set stays."""
    workers = f"{num_workers} worker{'s' * (num_workers != 1)}"
    servers = f" + {num_servers} server{'s' * (num_servers != 1)}" if num_servers else ""
    if set_by_user is not None:
        return set_by_user, f"{workers} × {_threads(set_by_user)}{servers} (OMP_NUM_THREADS)"
    threads = max(1, num_cores // max(1, num_workers))
    if servers:
        servers += f" × {_threads(server_threads(num_workers, num_servers, num_cores))}"
    return threads, f"{workers} × {_threads(threads)}{servers} on {num_cores} core{'s' * (num_cores != 1)}"


def server_threads(num_workers: int, num_servers: int, num_cores: int) -> int:
    """Threads for each server: it sums while workers compute, so it counts as one of them; workers, which compute nearly
    all the time, keep all cores among themselves."""
    return max(1, num_cores // (num_workers + num_servers))


def count_gpus(dev: Path = Path("/dev")) -> int:
    """NVIDIA devices of this machine, without loading CUDA or torch; CUDA_VISIBLE_DEVICES narrows them."""
    there = sum(1 for path in dev.glob("nvidia[0-9]*") if path.name[6:].isdigit())
    visible = env.visible_gpus()
    return there if visible is None else min(there, visible)


def _size(words: Iterable[str]) -> int:
    """Bytes of these words with their NULs."""
    return sum(len(os.fsencode(word)) + 1 for word in words)


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count != 1)}"


def _import_path() -> dict[str, str]:
    """PYTHONPATH with our own package when only the current folder holds it (a clone that was not installed)."""
    if importlib.machinery.PathFinder.find_spec("echelon", sys.path[1:]) is not None:
        return {}
    return {"PYTHONPATH": env.python_path(str(Path(__file__).resolve().parents[2]))}
