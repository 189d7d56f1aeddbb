"""The only reader of os.environ.

A process of a run is told who it is through ECHELON_* variables (CONTRACT: files, environment, processes).
The token is taken out of the environment as soon as it was read, so that no script, log or child sees it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from echelon.errors import UsageError

PREFIX = "ECHELON_"

ROOM = PREFIX + "ROOM"
"""A fork server's: it makes room where /proc shows the environment of the roles that it forks."""


LAID = PREFIX + "LAID"
"""The names of variables that a role was started with for the dynamic linker and the allocator, and that no script shall see."""


@dataclass(frozen=True)
class Place:
    """Where this process stands in its run; alone (plain python) it is worker 0 of 1 with no coordinator."""

    run: str = ""
    run_dir: Path | None = None
    role: str = "worker"
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    coordinator: str = ""
    incarnation: int = 0
    host: str = ""
    address: str = ""
    """This host's address that faces the others, when there are others; "" on one machine."""

    @property
    def supervised(self) -> bool:
        """True when `echelon run` started this process, so a coordinator is there."""
        return bool(self.coordinator)


def place() -> Place:
    """What the environment says about this process."""
    get = os.environ.get
    run_dir = get(PREFIX + "RUN_DIR")
    return Place(
        run=get(PREFIX + "RUN", ""),
        run_dir=Path(run_dir) if run_dir else None,
        role=get(PREFIX + "ROLE", "worker"),
        rank=int(get(PREFIX + "RANK", "0")),
        local_rank=int(get(PREFIX + "LOCAL_RANK", "0")),
        world_size=int(get(PREFIX + "WORLD_SIZE", "1")),
        coordinator=get(PREFIX + "COORDINATOR", ""),
        incarnation=int(get(PREFIX + "INCARNATION", "0")),
        host=socket.gethostname().split(".")[0],
        address=get(PREFIX + "ADDRESS", ""),
    )


@dataclass(frozen=True)
class Torchrun:
    """What torchrun tells a process that it started."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master: str

    @property
    def num_hosts_at_least(self) -> int:
        """2 when some ranks are on other hosts; how many hosts there are is not told."""
        return 1 if self.local_world_size == self.world_size else 2


def torchrun() -> Torchrun | None:
    """What torchrun says about this process; None when `echelon run` or nobody started it."""
    get = os.environ.get
    needed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if get(PREFIX + "COORDINATOR") or not get("TORCHELASTIC_RUN_ID") or not all(get(key) for key in needed):
        return None
    size = int(get("WORLD_SIZE", "1"))
    return Torchrun(
        rank=int(get("RANK", "0")), local_rank=int(get("LOCAL_RANK", "0")), world_size=size,
        local_world_size=int(get("LOCAL_WORLD_SIZE", str(size))), master=get("MASTER_ADDR", ""),
    )  # fmt: skip


def for_process(where: Place, *, num_threads: int | None, token_file: Path) -> dict[str, str]:
    """The environment of a new process of the run: the parent's, without any token, plus its place."""
    env = {k: v for k, v in os.environ.items() if k not in (PREFIX + "TOKEN", PREFIX + "TOKEN_FILE")}
    env |= {
        PREFIX + "RUN": where.run,
        PREFIX + "RUN_DIR": str(where.run_dir),
        PREFIX + "ROLE": where.role,
        PREFIX + "RANK": str(where.rank),
        PREFIX + "LOCAL_RANK": str(where.local_rank),
        PREFIX + "WORLD_SIZE": str(where.world_size),
        PREFIX + "COORDINATOR": where.coordinator,
        PREFIX + "INCARNATION": str(where.incarnation),
        PREFIX + "ADDRESS": where.address,
        PREFIX + "TOKEN_FILE": str(token_file),
        "RANK": str(where.rank),
        "WORLD_SIZE": str(where.world_size),
        "LOCAL_RANK": str(where.local_rank),
        "PYTHONUNBUFFERED": "1",
    }
    return env | ({} if num_threads is None else _threads(num_threads))


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}


def for_libraries(num_threads: int | None) -> dict[str, str]:
    """Variables that a fork server gets beside the guard's environment: libraries read it when they are imported, once for all roles.

    numpy's OpenBLAS starts threads at its import unless it is told to use one; roles set their own number."""
    return {
        "PYTHONUNBUFFERED": "1",
        "OPENBLAS_NUM_THREADS": "1",
        **({} if num_threads is None else _threads(num_threads)),
    }


def cold_start() -> bool:
    """ECHELON_START=cold: every role imports torch for itself."""
    wanted = os.environ.get(PREFIX + "START") or "fork"
    if wanted not in ("fork", "cold"):
        raise UsageError(f"{PREFIX}START={wanted} is not known", remedy="Use fork (the default) or cold.")
    return wanted == "cold"


def everything() -> dict[str, str]:
    """The environment of this process as it is now."""
    return dict(os.environ)


def replace(new: Mapping[str, str]) -> dict[str, str]:
    """Makes `new` this process's environment, and gives what it was before."""
    before = dict(os.environ)
    for name in before:
        if name not in new:
            del os.environ[name]
    os.environ.update(new)
    return before


def malloc(environment: Mapping[str, str]) -> str:
    """ECHELON_MALLOC: auto, none, or the path of an allocator."""
    return environment.get(PREFIX + "MALLOC") or "auto"


def laid(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables for a new role, with a note by which the role takes them out again."""
    return {**variables, LAID: ",".join(variables)} if variables else {}


def take_back() -> None:
    """Takes out what `laid` put in, so that the script and its subprocesses see the user's environment."""
    for name in filter(None, os.environ.pop(LAID, "").split(",")):
        os.environ.pop(name, None)


def own_token() -> str | None:
    """ECHELON_TOKEN, left where it is: for groups that no run of ours made."""
    return os.environ.get(PREFIX + "TOKEN")


def own_token_file() -> str | None:
    """ECHELON_TOKEN_FILE, left where it is."""
    return os.environ.get(PREFIX + "TOKEN_FILE")


def native() -> bool:
    """False when the user asks to go without the compiled core (ECHELON_NATIVE=0)."""
    return os.environ.get(PREFIX + "NATIVE", "") != "0"


def user_threads() -> int | None:
    """OMP_NUM_THREADS if the user set it: then we leave thread counts alone."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() else None


def take_token() -> str | None:
    """The run's token from ECHELON_TOKEN or the file ECHELON_TOKEN_FILE names; both leave the environment."""
    token, file = os.environ.pop(PREFIX + "TOKEN", None), os.environ.pop(PREFIX + "TOKEN_FILE", None)
    if token:
        return token
    return Path(file).read_text().strip() if file else None


def runs_dir() -> Path:
    """Where run folders are kept: $ECHELON_RUNS, else ./runs."""
    return Path(os.environ.get(PREFIX + "RUNS") or "runs")


def bind_gloo(interface: str, *, nccl: bool = False) -> None:
    """Tells gloo (and NCCL) the one interface that it may listen on: they read only the environment."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    if nccl:
        os.environ["NCCL_SOCKET_IFNAME"] = interface


def visible_gpus() -> int | None:
    """How many GPUs CUDA_VISIBLE_DEVICES leaves to this process, None when it says nothing."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else sum(1 for item in text.split(",") if item.strip() not in ("", "-1"))


def without_token() -> dict[str, str]:
    """This process's environment as a child that needs no token may see it."""
    return {k: v for k, v in os.environ.items() if k not in (PREFIX + "TOKEN", PREFIX + "TOKEN_FILE")}


def python_path(first: str) -> str:
    """PYTHONPATH with `first` before whatever is there."""
    before = os.environ.get("PYTHONPATH")
    return f"{first}{os.pathsep}{before}" if before else first
