"""What a worker sees of all parameter servers together: links, sums, and the ranges of a model that they hold."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from echelon import activity
from echelon.clock import Deadline
from echelon.comm.group import Lost, Met, Outcome
from echelon.control.member import Member
from echelon.errors import EchelonError, LinkLost, PeerLost, UsageError, WorldError
from echelon.ps.duty import address_key
from echelon.ps.frame import TRAINING
from echelon.ps.keys import Holder, Placement, place
from echelon.ps.keys import Tensor as Spec
from echelon.ps.link import Link
from echelon.ps.pending import Answered, Pending, Reply
from echelon.ps.recipes import Recipe

CONNECT_S = 60.0
WAIT_S = 1800.0
"""How long an answer may take: it may wait for the slowest worker. Who stands still is named long before (elastic/stuck.py)."""


LANES = 4
"""Connections to a server on another host that sums go over. Streams share a link evenly, and the workers' own all-reduce has as many
beside them: with one, a server's link would stand idle while workers fill theirs with each other's data."""


class Servers:
    """Every server's link, by rank. Waits are recorded, so that a server that stands still is named."""

    def __init__(
        self, links: Sequence[Link], hosts: Sequence[str], lanes: Sequence[Sequence[Link]] | None = None
    ) -> None:
        self.links, self.hosts = list(links), list(hosts)
        self.lanes = [list(of) for of in lanes] if lanes is not None else [[link] for link in links]
        """By server: the connections over which sums go, the link of `links` among them."""
        self.numbers: dict[int, int] = {}
        """Model -> operations begun so far that every worker takes part in."""
        self._begun = self._models = 0
        self._lock = threading.Lock()

    @classmethod
    def of_run(cls, member: Member, num_servers: int) -> Servers:
        """Connects to all servers of a run; blocks until they are there."""
        deadline = Deadline.after(CONNECT_S)
        wire = member.dial(deadline)
        lanes: list[list[Link]] = []
        try:
            for rank in range(num_servers):
                with activity.waiting(
                    f"{activity.SERVERS} {rank}", activity.ANYBODY, "the address of a server"
                ):
                    found = wire.call(
                        "store.get", deadline, key=address_key(rank), timeout_s=CONNECT_S, term=1 << 53
                    )
                to = (bytes(found).decode(), member.token, member.identity, deadline)
                lanes.append([Link.connect(*to, limits=TRAINING)])
                if not lanes[-1][0].local:
                    lanes[-1] += [Link.connect(*to, limits=TRAINING) for _ in range(LANES - 1)]
        except BaseException:
            for link in (link for of in lanes for link in of):
                link.close()
            raise
        finally:
            wire.close()
        seats = member.servers()
        hosts = [str(seats.get(rank, {}).get("host", "")) for rank in range(num_servers)]
        return cls([of[0] for of in lanes], hosts, lanes)

    def __len__(self) -> int:
        return len(self.links)

    def close(self) -> None:
        for link in (link for of in self.lanes for link in of):
            link.close()

    def new_model(self) -> int:
        """Its number: the same on all workers, since all prepare their models in the same order."""
        self._models += 1
        return self._models

    def number(self, model: int) -> int:
        """Of an operation in which every worker takes part: the same on all, since all begin them in the same order."""
        with self._lock:
            self.numbers[model] = self.numbers.get(model, 0) + 1
            self._begun += 1
            activity.begun[activity.SERVERS] = self._begun
            return self.numbers[model]

    def wait(self, pendings: Sequence[Answered], what: str, num_bytes: int = 0) -> list[Reply]:
        """Every answer. Raises what a server raised, LinkLost, PeerLost."""
        deadline = Deadline.after(WAIT_S)
        replies = []
        with activity.waiting(activity.SERVERS, self._begun, what, num_bytes):
            for pending in pendings:
                replies.append(pending.wait(deadline))
        return replies

    def outcome(self, pendings: Sequence[Answered], what: str, num_bytes: int = 0) -> Outcome:
        """Met once all are answered; Lost when a server or a worker is gone."""
        try:
            self.wait(pendings, what, num_bytes)
        except (LinkLost, PeerLost) as error:
            return lost(error)
        return Met()


def lost(error: EchelonError) -> Lost:
    return Lost(error.peers, error.message)


class Held:
    """One model's parameters on the servers (apply=server). `params` are (name, parameter) in the order of the backward pass.

    Values are pulled into one memory a server and copied from there into the parameters.
    """

    def __init__(self, servers: Servers, model: int, params: Sequence[tuple[str, Tensor]], rank: int) -> None:
        self.servers, self.model, self.rank = servers, model, rank
        self.params = dict(params)
        specs = [
            Spec(name, p.numel(), p.element_size(), str(p.dtype).removeprefix("torch.")) for name, p in params
        ]
        self.placement: Placement = place(specs, len(servers))
        self.pulled: list[Tensor] = []
        """By server: its ranges as they were pulled last."""
        self._pairs: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._pushes = self.steps = 0
        for index, link in enumerate(servers.links):
            size = self.placement.memory_bytes(Holder("server", index))
            self.pulled.append(link.buffer(max(size, 64)).zero_())
        self._places: list[int] = []
        self.follow()

    def follow(self) -> None:
        """Parameters whose memory the script replaced (`p.data = …`) are found again."""
        places = [p.data_ptr() for p in self.params.values()]
        if places == self._places:
            return
        into, flats = [], {name: _flat(p) for name, p in self.params.items()}
        for r in self.placement.ranges:
            flat, dtype = flats[r.tensor.name], getattr(torch, r.tensor.dtype)
            if (flat.numel(), flat.dtype) != (r.tensor.numel, dtype):
                raise UsageError(
                    f"`{r.tensor.name}` is {flat.numel()} of {flat.dtype} now, and the servers hold {r.tensor.numel} of {dtype}",
                    remedy="Change shapes and types before run.prepare.",
                )
            memory = self.pulled[r.holder.rank][r.offset_bytes : r.offset_bytes + r.nbytes]
            into.append((flat[r.begin : r.end], memory.view(dtype)))
        self._pairs = [live for live, _ in into], [memory for _, memory in into]
        self._places = places

    def edited(self) -> bool:
        """Did the script write into parameters since they were pulled? Sees every bit, also what was written past autograd's
        counters (`p.data.clamp_()`)."""
        live, memory = self._pairs
        return not all(torch.equal(_bits(a), _bits(b)) for a, b in zip(live, memory, strict=True))

    def open(self) -> None:
        """Every worker opens; the values are worker 0's. Blocks until they are there."""
        self._gather()
        pendings = []
        for index, link in enumerate(self.servers.links):
            held = self.placement.held_by(Holder("server", index))
            ranges = [[r.key, r.offset_bytes, r.numel, r.tensor.dtype] for r in held]
            payload = [self.pulled[index]] if self.rank == 0 else []
            pendings.append(link.call("train.open", {"model": self.model, "ranges": ranges}, payload))
        self.servers.wait(pendings, "opening a model on the servers")

    def upload(self) -> None:
        """Worker 0's values are the servers' from now on. Only between steps."""
        if self.rank == 0:
            self._gather()
            head = {"model": self.model}
            calls = zip(self.servers.links, self.pulled, strict=True)
            self.servers.wait(
                [link.call("train.values", head, x) for link, x in calls], "values to the servers"
            )

    @torch.no_grad()
    def _gather(self) -> None:
        live, memory = self._pairs
        if live:
            torch._foreach_copy_(memory, live)

    @torch.no_grad()
    def swap_in(self) -> None:
        """The parameters become what was pulled."""
        live, memory = self._pairs
        if live:
            torch._foreach_copy_(live, memory)

    # -- gradients -------------------------------------------------------------------------------------------------

    def runs(self, names: Sequence[str], starts: Sequence[int]) -> list[list[tuple[list[int], int, int]]]:
        """By server: (keys, begin, end) of the pieces of a flat buffer in which these tensors begin at `starts`; neighbours
        that go to one server are one piece."""
        by_server: list[list[tuple[list[int], int, int]]] = [[] for _ in self.servers.links]
        for name, start in zip(names, starts, strict=True):
            for r in self.placement.pieces(name):
                found = by_server[r.holder.rank]
                begin, end = start + r.begin, start + r.end
                if found and found[-1][2] == begin:
                    found[-1] = ([*found[-1][0], r.key], found[-1][1], end)
                else:
                    found.append(([r.key], begin, end))
        return by_server

    def push(
        self, flat: Tensor, runs: list[list[tuple[list[int], int, int]]]
    ) -> list[tuple[int, int, Pending]]:
        """Pieces of a flat buffer to their servers: (server, number of the push, call). The buffer is the servers' until the calls
        are done."""
        sent = []
        for index, (link, mine) in enumerate(zip(self.servers.links, runs, strict=True)):
            if mine:
                self._pushes += 1
                head = {"model": self.model, "push": self._pushes, "keys": [keys for keys, _, _ in mine]}
                payload = [flat[begin:end] for _, begin, end in mine]
                sent.append((index, self._pushes, link.call("train.push", head, payload)))
        return sent

    def take_back(self, pushes: Sequence[tuple[int, int, Pending]]) -> None:
        """Blocks until the buffers of these pushes are ours again; they do not count."""
        calls = []
        for index, number, _ in pushes:
            head = {"model": self.model, "pushes": [number]}
            calls.append(self.servers.links[index].call("train.back", head))
        self.servers.wait([*calls, *(pending for _, _, pending in pushes)], "a push to be taken back")

    # -- together --------------------------------------------------------------------------------------------------

    def keys(self, names: Sequence[str]) -> list[list[int]]:
        """By server: the keys of these tensors."""
        found: list[list[int]] = [[] for _ in self.servers.links]
        for name in names:
            for r in self.placement.pieces(name):
                found[r.holder.rank].append(r.key)
        return found

    def rooms(self) -> list[Tensor]:
        """Memory for the values of all servers, one each."""
        return [link.buffer(x.nbytes) for link, x in zip(self.servers.links, self.pulled, strict=True)]

    def step(
        self,
        optimizer: int,
        groups: Sequence[tuple[Recipe, Sequence[str]]],
        parts: Sequence[tuple[Tensor, list[list[tuple[list[int], int, int]]]]],
        used: Sequence[str],
        out: Sequence[Tensor],
        **numbers: Any,
    ) -> tuple[int, list[Pending]]:
        """A part of an update and its step in one call to each server, which has copies of `parts` when this returns: the number of
        the update, and the calls. `out` is written before they are done."""
        self.servers.number(self.model)
        self.steps = number = self.steps + 1  # updates are numbered by steps alone
        keyed = [(recipe.to_plain(), self.keys(names)) for recipe, names in groups]
        mine = self.keys(used)
        calls = []
        for index, link in enumerate(self.servers.links):
            keys: list[list[int]] = []
            payload: list[Tensor] = []
            for flat, runs in parts:
                keys += [run for run, _, _ in runs[index]]
                payload += [flat[begin:end].clone() for _, begin, end in runs[index]]
            head: dict[str, Any] = {
                "model": self.model, "number": number, "optimizer": optimizer, "keys": keys, "used": mine[index],
                "groups": [[plain, by_server[index]] for plain, by_server in keyed], **numbers,
            }  # fmt: skip
            calls.append(link.call("train.step", head, payload, out=[out[index]]))
        return number, calls

    def pull(self) -> None:
        """The parameters become what the servers have now."""
        pulls = zip(self.servers.links, self.pulled, strict=True)
        head = {"model": self.model}
        self.servers.wait(
            [link.call("train.pull", head, out=[x]) for link, x in pulls], "values of the servers"
        )
        self.swap_in()

    @torch.no_grad()
    def take(self, memory: Sequence[Tensor]) -> None:
        """The parameters become what lies in these (of rooms())."""
        for index, x in enumerate(memory):
            self.pulled[index].copy_(x)
        self.swap_in()

    def squares(self, names: Sequence[str]) -> tuple[list[float], bool]:
        """Each tensor's sum of squares of its global gradient, and whether all are finite. Every worker calls it."""
        number = self.servers.number(self.model)
        keys = self.keys(names)
        pendings = [
            link.call("train.squares", {"model": self.model, "number": number, "keys": mine})
            for link, mine in zip(self.servers.links, keys, strict=True)
        ]
        replies = self.servers.wait(pendings, "the norm of the gradients")
        found = {
            key: x
            for r, mine in zip(replies, keys, strict=True)
            for key, x in zip(mine, r.head["squares"], strict=True)
        }
        whole = [math.fsum(found[r.key] for r in self.placement.pieces(name)) for name in names]
        return whole, all(r.head["finite"] for r in replies)

    def apply(
        self, optimizer: int, groups: Sequence[tuple[Recipe, float, Sequence[str]]], unused: Sequence[str]
    ) -> None:
        """The optimizer's step on the servers, with each group's factor times the gradient; the parameters are the new ones when
        it returns. Every worker calls it."""
        number = self.servers.number(self.model)
        skip = self.keys(unused)
        keyed = [(recipe.to_plain(), factor, self.keys(names)) for recipe, factor, names in groups]
        pendings = []
        for index, link in enumerate(self.servers.links):
            head: dict[str, Any] = {
                "model": self.model, "number": number, "optimizer": optimizer, "unused": skip[index],
                "groups": [[plain, factor, keys[index]] for plain, factor, keys in keyed],
            }  # fmt: skip
            pendings.append(link.call("train.apply", head, out=[self.pulled[index]]))
        self.servers.wait(pendings, "the servers' step", sum(x.nbytes for x in self.pulled))
        self.swap_in()

    # -- state -----------------------------------------------------------------------------------------------------

    def state(self, optimizer: int, names: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state of these tensors, whole, as torch has it. Any worker may ask, between steps."""
        keys = self.keys(names)
        calls = [
            link.call("train.state", {"model": self.model, "optimizer": optimizer, "keys": mine})
            for link, mine in zip(self.servers.links, keys, strict=True)
        ]
        found: dict[str, dict[str, Tensor]] = {}
        for reply in self.servers.wait(calls, "the state of the servers' optimizers"):
            at = 0
            for key, steps, arrays, there in reply.head["state"]:
                r = self.placement.ranges[key]
                if there:
                    mine = found.setdefault(r.tensor.name, {})
                    if steps >= 0:
                        mine["step"] = torch.tensor(float(steps))
                    param = self.params[r.tensor.name]
                    for name in arrays:
                        whole = mine.setdefault(name, torch.zeros_like(param))
                        _flat(whole)[r.begin : r.end].copy_(reply.tensors[at].view(-1))
                        at += 1
        return found

    def load(
        self, optimizer: int, groups: Sequence[tuple[Recipe, Sequence[str]]], state: dict[str, dict[str, Any]]
    ) -> None:
        """Worker 0's values and this state are the servers' from now on. Every worker calls it, and returns when they are."""
        if self.rank == 0:
            self._load(optimizer, groups, state)
        self.squares([])  # nobody asks for the state before it is there

    def _load(
        self, optimizer: int, groups: Sequence[tuple[Recipe, Sequence[str]]], state: dict[str, dict[str, Any]]
    ) -> None:
        self.upload()
        calls = []
        for index, link in enumerate(self.servers.links):
            told, tensors = [], []
            recipes = [(recipe.to_plain(), self.keys(names)[index]) for recipe, names in groups]
            for _, keys in recipes:
                for key in keys:
                    r = self.placement.ranges[key]
                    mine = state.get(r.tensor.name, {})
                    arrays = {k: v for k, v in mine.items() if k != "step" and isinstance(v, Tensor)}
                    steps = int(mine["step"]) if "step" in mine else -1
                    told.append([key, steps, list(arrays), bool(arrays)])
                    tensors += [_flat(x)[r.begin : r.end] for x in arrays.values()]
            head = {"model": self.model, "optimizer": optimizer, "recipes": recipes, "state": told}
            calls.append(link.call("train.load", head, tensors))
        self.servers.wait(calls, "state to the servers")


def _bits(x: Tensor) -> Tensor:
    return x.cpu().view(torch.int32 if x.element_size() == 4 else torch.int64)


def _flat(x: Tensor) -> Tensor:
    """One dimension over the memory of x, in the order in which it lies there."""
    x = x.detach()
    if x.is_contiguous():
        return x.view(-1)
    if x.numel() and x.untyped_storage().nbytes() < (x.storage_offset() + x.numel()) * x.element_size():
        raise WorldError("a parameter whose elements overlap cannot lie on a server")
    return x.as_strided((x.numel(),), (1,), x.storage_offset())
