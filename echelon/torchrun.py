"""torchrun as the starter: rank 0 brings a coordinator of ours, all find it through torch's store, and the run goes on as usual.

torch's store is the boundary of trust here: whoever can speak to it learns the run's token. Exit codes, restarts and the
end of the processes are torchrun's; the coordinator is a child of rank 0 and ends with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from echelon import env, failure
from echelon.clock import Deadline
from echelon.control import forks, net
from echelon.control import token as tokens
from echelon.control.member import Member, set_current
from echelon.control.roster import JOINED
from echelon.control.rpc import Unreached
from echelon.errors import EchelonError, WorldError
from echelon.events import Beat, Event, Left
from echelon.launch import listen, rundir
from echelon.launch.link import Link
from echelon.launch.rundir import Process, RunDir, start_ticks

JOIN_S = 60.0
LEAVE_S = 5.0
LOOK_S = 0.05
NEWER_S = 8.0
"""How long a rank that reaches nobody waits for rank 0 to say something new: what stands in the way is told within 10 s."""
LAST_S = 10.0
"""How long rank 0 stays for the others at the end: the coordinator ends with it."""


def adopt(name: str | None, run_dir: str | Path | None) -> Adopted:
    """Joins the ranks that torchrun started. Blocks until this one has joined."""
    told = env.torchrun()
    assert told is not None
    deadline = Deadline.after(JOIN_S)
    store = PrefixStore("echelon", next(iter(rendezvous("env://", timeout=timedelta(seconds=JOIN_S))))[0])
    coordinator = (
        Coordinator(told, name, Path(run_dir) if run_dir is not None else None) if told.rank == 0 else None
    )
    if coordinator is not None:
        store.set("run", json.dumps(coordinator.card))
    said = _card(store)
    try:
        member = Member.join(_place(told, json.loads(said)), json.loads(said)["token"], deadline)
    except Unreached:  # it may be what rank 0 said before torchrun started all again: torch's store stays
        newer = _newer(store, said) if coordinator is None else None
        if newer is None:
            raise
        said = newer
        member = Member.join(_place(told, json.loads(said)), json.loads(said)["token"], deadline)
    set_current(member)
    return Adopted(member, coordinator, json.loads(said)["token"])


def _card(store: PrefixStore) -> bytes:
    """What rank 0 said of its coordinator; blocks until it has said something."""
    try:
        return bytes(store.get("run"))
    except RuntimeError as error:
        raise WorldError(f"rank 0 did not say where the run is: {str(error).splitlines()[0]}") from None


def _newer(store: PrefixStore, before: bytes) -> bytes | None:
    """What rank 0 says of another coordinator than `before`; None if it says nothing new within NEWER_S."""
    deadline, pause = Deadline.after(NEWER_S), threading.Event()
    while not deadline.passed:
        said = _card(store)
        if said != before:
            return said
        pause.wait(LOOK_S)
    return None


def _place(told: env.Torchrun, card: dict[str, str]) -> env.Place:
    host, _ = net.split(card["coordinator"])
    if told.num_hosts_at_least > 1 and net.is_loopback(host):
        raise _loopback(told.master, host)
    return env.Place(
        run=card["run"], run_dir=Path(card["run_dir"]), rank=told.rank, local_rank=told.local_rank,
        world_size=told.world_size, coordinator=card["coordinator"],
        host=socket.gethostname().split(".")[0],
        address=net.local_address(host) if told.num_hosts_at_least > 1 else "",
    )  # fmt: skip


class Coordinator:
    """The coordinator's process, and the folder it writes to. Both belong to rank 0."""

    def __init__(self, told: env.Torchrun, name: str | None, run_dir: Path | None) -> None:
        token = tokens.make()
        address = listen.LOOPBACK
        if told.num_hosts_at_least > 1:
            address = net.local_address(told.master)
            if net.is_loopback(address):
                raise _loopback(told.master, address)
        run, self.folder = rundir.create(sys.argv[0] or "python", name=name, run_dir=run_dir, now=time.time())
        host, pid = socket.gethostname().split(".")[0], os.getpid()
        self._lifeline_out, self._lifeline = os.pipe()
        forks.register(self)
        with listen.open_socket(address, 0) as listening:
            where = env.Place(run=run, run_dir=self.folder.path, role="coordinator", world_size=told.world_size,
                              coordinator=net.spell(address, listening.getsockname()[1]), host=host)  # fmt: skip
            self.folder.write({
                "name": run, "script": sys.argv[0], "module": False, "args": sys.argv[1:], "strategy": {},
                "set_by_user": {}, "num_workers": told.world_size, "started": time.time(), "host": host,
                "python": sys.executable, "coordinator": where.coordinator, "starter": "torchrun",
            })  # fmt: skip
            self.folder.put(Process("supervisor", 0, host, pid, time.time(), start_ticks(pid)))
            tokens.write(self.folder.token, token)
            self._start(where, listening)
        self.card = {
            "run": run,
            "run_dir": str(self.folder.path),
            "coordinator": where.coordinator,
            "token": token,
        }

    def _start(self, where: env.Place, listening: socket.socket) -> None:
        fds = (listening.fileno(), self._lifeline_out)
        command = [
            sys.executable, "-m", "echelon.role", "coordinator", "--rank", "0", "--run", where.run,
            "--listen-fd", str(fds[0]), "--lifeline-fd", str(fds[1]),
        ]  # fmt: skip
        with self.folder.log("coordinator", 0).open("ab") as log:
            self.process = subprocess.Popen(
                command, pass_fds=fds, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=env.for_process(where, num_threads=None, token_file=self.folder.token)
                | {"PYTHONPATH": env.python_path(str(Path(__file__).parents[1]))},
            )  # fmt: skip
        os.close(self._lifeline_out)

    def after_fork(self) -> None:
        """A DataLoader's worker must not keep the coordinator alive after rank 0."""
        with contextlib.suppress(OSError):
            os.close(self._lifeline)

    def close(self, code: int) -> None:
        os.close(self._lifeline)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LEAVE_S)
        supervisor = self.folder.processes["supervisor", 0]
        supervisor.code, supervisor.ended = code, time.time()
        self.folder.put(supervisor)
        self.folder.update(ended=time.time(), code=code)


class Adopted:
    """This rank under torchrun: its member, and on rank 0 what the others lean on."""

    def __init__(self, member: Member, coordinator: Coordinator | None, token: str) -> None:
        self.member, self._coordinator = member, coordinator
        self._link: Link | None = None
        self._show: threading.Thread | None = None
        self._over = threading.Event()
        if coordinator is not None:
            coordinator.folder.token.unlink(
                missing_ok=True
            )  # it was read, and the others have it from the store
            place = dataclasses.replace(member.place, role="supervisor", rank=0)
            self._link = Link(place, token, lambda: None)

    @property
    def folder(self) -> RunDir | None:
        return self._coordinator.folder if self._coordinator is not None else None

    def show(self, handle: Callable[[Event], None], tick: Callable[[], None]) -> None:
        """On rank 0: what happens in the run goes to `handle`, from one thread of its own, which also calls `tick`."""
        link = self._link
        if link is None:
            return

        def work() -> None:
            over = False
            while not over:
                over = self._over.wait(0.1)
                for event in link.heard():
                    handle(event)
                tick()

        link.start()
        self._show = threading.Thread(target=work, name="echelon-show", daemon=True)
        self._show.start()

    def close(self, last: Beat) -> None:
        """Takes leave with a last beat; rank 0 stays until the others have too, unless its own script failed."""
        step = last.step
        self.member.emit(last)
        error: Any = getattr(sys, "last_value", None)
        place, deadline = self.member.place, Deadline.after(LEAVE_S)
        code = failure.exit_code(error) if error is not None else 0
        if error is not None:
            self.member.emit(
                failure.describe(error, rank=place.rank, host=place.host, step=step, run=place.run)
            )
        else:
            self.member.emit(Left(rank=place.rank, step=step))
        self.member.flush(deadline)
        with contextlib.suppress(EchelonError):
            self.member.call("leave", deadline, step=step, code=code)
        if self._coordinator is not None and code == 0:
            self._stay()
        self._over.set()
        if self._show is not None:
            self._show.join(LEAVE_S)
        if self._link is not None:
            self._link.close(Deadline.after(0.5))
        self.member.close()
        if self._coordinator is not None:
            self._coordinator.close(code)

    def _stay(self) -> None:
        deadline, pause = Deadline.after(LAST_S), threading.Event()
        while not deadline.passed:
            try:
                if all(seat["state"] != JOINED for seat in self.member.roster().values()):
                    pause.wait(0.2)  # the last events are on their way to the screen
                    return
            except EchelonError:
                return
            pause.wait(0.1)


def _loopback(master: str, address: str) -> WorldError:
    return WorldError(
        f"torchrun's MASTER_ADDR {master} is {address} here: only this machine reaches it, and there are several",
        remedy="Give torchrun an address that all reach: --rdzv-endpoint ADDR:PORT, or --local-addr ADDR on the first node.",
    )
