"""Which Group carries a run: the one place that knows the difference between one rank and many."""

from __future__ import annotations

import contextlib
import datetime
import re
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from echelon import env, native
from echelon.activity import MEMBERS
from echelon.clock import Deadline
from echelon.comm import gloo, hosts
from echelon.comm.alone import AloneGroup
from echelon.comm.changing import ChangingGroup
from echelon.comm.echo import EchoGroup
from echelon.comm.group import Group
from echelon.comm.handover import Seat, StoreMeeting
from echelon.comm.over_native import NativeGroup
from echelon.comm.over_torch import OP_LIMIT_S, Blame, TorchGroup
from echelon.comm.store import CoordinatorStore
from echelon.control import net
from echelon.control.member import Member
from echelon.errors import UsageError

BLAME_LIMIT_S = 3.0
SILENCE_S = 120.0
"""When the core gives up on a host by itself. In a run the watch for stuck workers names a dead link after 10 s and decides by
policy, and a vanished host is the coordinator's to notice: both come first."""
ENTER_S = 300.0
"""The longest that ranks wait for each other to share memory; a death in between ends it at once."""
ENTER_AGAIN_S = 1800.0
"""The same in a later term, where one of them may still be on its way through its script."""
CONNECT_AGAIN_S = 20.0
"""How long they may take then, once all are there: one may die in between, and the next term must not wait for long."""


def device_for(local_rank: int) -> torch.device:
    """This rank's GPU, shared in turn if there are fewer GPUs than workers; else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def backend_for(asked: str, device: torch.device, workers: int, several_hosts: bool = False) -> str:
    """What carries the gradients, or "alone" for one rank that nobody asked to talk. All ranks must choose alike, and a rank
    cannot see which GPUs those of other hosts have: across hosts NCCL is for those who ask."""
    if asked in ("gloo", "nccl", "native"):
        return asked
    if workers == 1:
        return "alone"
    enough = device.type == "cuda" and torch.cuda.device_count() >= workers
    if enough and not several_hosts:
        return "nccl"
    return "gloo" if native.core() is None else "native"


class Groups:
    """Makes the groups of a run. All ranks make the same ones in the same order."""

    def __init__(
        self, backend: str, rank: int, size: int, device: torch.device, member: Member | None
    ) -> None:
        self.backend, self.rank, self.size, self.device, self.member = backend, rank, size, device, member
        self.made: list[Group] = []
        self.term: int | None = None
        """The one that the groups are of; None: the one in which the run formed."""
        self._store: CoordinatorStore | None = None
        self._pretends = False
        self._torch = ""
        """The backend of torch.distributed's default group, once it was opened here."""

    def make(self, name: str = "gradients", ranks: Sequence[int] | None = None) -> Group:
        """A new group of all ranks, or of `ranks`, of which this is one: they all make it, the others do not.

        `name` is what people read when somebody is waited for in it. With gloo or NCCL the first one of all ranks also becomes
        torch.distributed's default group."""
        group: Group
        ranks = tuple(range(self.size)) if ranks is None else tuple(ranks)
        whole = len(ranks) == self.size
        name = name if whole else f"{name}{MEMBERS}{','.join(map(str, ranks))}"
        if self.backend == "alone" or len(ranks) == 1 < self.size:
            group = AloneGroup(self.device)
        elif self.backend == "echo":
            alone = len(ranks) == 1
            group = (
                AloneGroup(self.device)
                if alone
                else EchoGroup(ranks.index(self.rank), len(ranks), self.device)
            )
        elif self.backend == "native" and self.member is not None:
            group = changing = ChangingGroup(
                self._fresh(name),
                ranks.index(self.rank),
                len(ranks),
                self.device,
                partial(self._native, ranks=ranks),
            )
            changing.pretends = self._pretends
            if not self._pretends:
                _ = changing.inner  # blocks until all are in
        elif self.backend == "native":
            group = self._native(self._fresh(name), ranks)
        else:
            group = self._torch_group(name, ranks, whole)
        self.made.append(group)
        return group

    def _torch_group(self, name: str, ranks: Sequence[int], whole: bool) -> Group:
        fresh = not dist.is_initialized()
        with self._bound():
            if fresh:
                self._init_torch()
            if whole:
                pg = dist.group.WORLD if fresh else dist.new_group(backend=self.backend)
            else:
                pg = dist.new_group(list(ranks), backend=self.backend, use_local_synchronization=True)
        assert pg is not None
        return TorchGroup(pg, self.device, self._blame(), self._fresh(name))

    def open_torch(self, backend: str) -> None:
        """Makes torch.distributed's default group over this backend of ours, unless there is one; close() ends it."""
        if self.member is not None and not dist.is_initialized():
            limit = datetime.timedelta(seconds=OP_LIMIT_S)
            store = CoordinatorStore(self.member, name="torch", term=self.term)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=limit)
            self._torch = backend

    @property
    def sent_bytes(self) -> float:
        """What this rank sent over all of them so far: see Group."""
        return sum(group.sent_bytes for group in self.made)

    # -- a new term ----------------------------------------------------------------------------------------------

    @property
    def changing(self) -> list[ChangingGroup]:
        """Those that can be made anew; [] where none can."""
        return [group for group in self.made if isinstance(group, ChangingGroup)]

    def renew(self, term: int) -> None:
        """From now on all groups are of this term. What was under way is lost. Blocks until all ranks are in the first group; raises
        what kept them from it."""
        self.term = term
        if self._store is not None:
            self._store.close()
            self._store = None
        for group in self.changing:
            group.change()
        _ = self.changing[0].inner

    def renew_torch(self) -> None:
        """torch.distributed's default group of the new term; those that a script made itself are gone."""
        if self._torch and dist.is_initialized():
            dist.destroy_process_group()
            self.open_torch(self._torch)

    def pretend(self, so: bool) -> None:
        """Nothing that is asked of the groups counts, and nobody is waited for: until pretend(False)."""
        self._pretends = so
        for group in self.changing:
            group.pretends = so

    def _native(self, name: str, ranks: Sequence[int]) -> Group:
        core = native.core()
        if core is None:
            raise UsageError(
                "backend=native needs the compiled core",
                remedy="Build it with `pip install .` or `make native`.",
            )
        seat, meeting = Seat(0, 1, secrets.token_hex(32), "alone"), StoreMeeting(dist.HashStore())  # type: ignore[attr-defined]
        address = "127.0.0.1"
        if self.member is not None:
            place = self.member.place
            term = self.member.term if self.term is None else self.term
            seat = Seat(ranks.index(self.rank), len(ranks), self.member.token, place.run, term)
            address = place.address or net.local_address(net.split(place.coordinator)[0])
            if self._store is None:
                self._store = CoordinatorStore(self.member, name="native", term=term)
            meeting = StoreMeeting(self._store)
        enter_s, connect_s = (ENTER_S, ENTER_S) if self.term is None else (ENTER_AGAIN_S, CONNECT_AGAIN_S)
        deadline = Deadline.after(enter_s)
        group = hosts.enter(
            core, meeting, seat, name, address, deadline, limit_s=SILENCE_S, connect_s=connect_s
        )
        return NativeGroup(group, seat.rank, seat.size, self.device, name, self._blame(), ranks=ranks)

    def _bound(self) -> contextlib.AbstractContextManager[None]:
        """Among several hosts, the address that faces the others; on one, gloo's interface is enough."""
        address = self.member.place.address if self.member is not None else ""
        return gloo.bound_to(address) if address and self.backend == "gloo" else contextlib.nullcontext()

    def _fresh(self, name: str) -> str:
        num_alike = sum(re.sub(r" \d+$", "", getattr(group, "name", "")) == name for group in self.made)
        return f"{name} {num_alike + 1}" if num_alike else name

    def _init_torch(self) -> None:
        store: Any
        if self.member is None:
            store = dist.HashStore()  # type: ignore[attr-defined]
        else:
            store = CoordinatorStore(self.member)
            host, _ = net.split(self.member.place.coordinator)
            interface = net.interface_of(self.member.place.address or net.local_address(host))
            env.bind_gloo(interface, nccl=bool(self.member.place.address))
        limit = datetime.timedelta(seconds=OP_LIMIT_S)
        dist.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=self.size, timeout=limit
        )

    def _blame(self) -> Blame | None:
        member = self.member
        return None if member is None else lambda reason: _gone(member.roster, self.rank)

    def close(self) -> None:
        if self._torch and dist.is_initialized():
            dist.destroy_process_group()
        for group in reversed(self.made):
            group.close()
        if self._store is not None:
            self._store.close()


def _gone(roster: Callable[[], dict[int, dict[str, object]]], me: int) -> tuple[int, ...]:
    """The peers that the coordinator knows to be gone; asks for a moment, since news may be on its way."""
    import threading

    deadline, pause = Deadline.after(BLAME_LIMIT_S), threading.Event()
    while True:
        try:
            states = {r: seat["state"] for r, seat in roster().items() if r != me}
        except Exception:  # the coordinator may be gone as well: then nobody can be named
            states = {}
        fallen = tuple(r for r, state in states.items() if state in ("dead", "failed"))
        gone = fallen or tuple(
            r for r, state in states.items() if state == "left"
        )  # who left may only have followed
        if gone or deadline.passed:
            return gone
        pause.wait(0.1)
