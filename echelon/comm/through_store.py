"""A Group whose ranks meet through torch's store: what stands under the PyTorch backend.

The store is the boundary of trust: whoever can speak to it can join the group.
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from echelon import env, native
from echelon.clock import Deadline
from echelon.comm import hosts
from echelon.comm.alone import AloneGroup
from echelon.comm.group import Group, Lost
from echelon.comm.handover import Seat, StoreMeeting
from echelon.comm.over_native import NativeGroup
from echelon.comm.over_torch import TorchGroup
from echelon.control import member, net
from echelon.errors import WorldError


def make(store: Store, rank: int, size: int, name: str, deadline: Deadline) -> Group:
    """The Group of these ranks. Blocks until all of them have come; WorldError when they have not by the deadline.

    Every rank calls this with a store that shows it the same keys (and no other group's), and with the same name, which
    is what people read when somebody is waited for in it.
    """
    if size == 1:
        return AloneGroup()
    core = native.core()
    meeting = StoreMeeting(PrefixStore("native/", store))
    meeting.put(f"core/{rank}", b"there" if core is not None else b"")
    if not all(meeting.get(f"core/{r}", deadline) for r in range(size)):
        core = None  # one without it, and all go without
    group: Group
    if core is None:
        group = _over_gloo(store, rank, size, name, deadline)
    else:
        seat = Seat(rank, size, _token(meeting, rank, deadline), "torch")
        inner = hosts.enter(core, meeting, seat, name, _address(store), deadline)
        group = NativeGroup(inner, rank, size, torch.device("cpu"), name)
    outcome = group.barrier().wait(
        deadline
    )  # whoever left now would close connections that others still make
    if isinstance(outcome, Lost):
        raise WorldError(
            f"the {size} ranks of group {name} did not come together: {outcome.reason}",
            remedy="Look at the output of the other ranks: one of them died, or never made this group.",
        )
    return group


def _token(meeting: StoreMeeting, rank: int, deadline: Deadline) -> str:
    """The user's or the run's token; without one, a fresh one that travels through the store."""
    current = member.current()
    if token := (current.token if current is not None else env.own_token()):
        return token
    if rank == 0:
        meeting.put("token", secrets.token_hex(32).encode())
    return meeting.get("token", deadline).decode()


def _address(store: Store) -> str:
    """This host's address that faces the others: the one on the route to the store's host."""
    current = member.current()
    if current is not None:
        return current.place.address or net.local_address(net.split(current.place.coordinator)[0])
    inner = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    return net.local_address(getattr(inner, "host", "127.0.0.1"))


def _over_gloo(store: Store, rank: int, size: int, name: str, deadline: Deadline) -> Group:
    limit = timedelta(seconds=max(0.001, deadline.left_s))
    gloo: Any = ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, limit)
    return TorchGroup(gloo, torch.device("cpu"), name=name, timed=True)
