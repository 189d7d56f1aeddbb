"""What a server holds, by shard and model: led by this server, or copied from the one that leads it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from echelon.errors import PeerLost, UsageError, WireError
from echelon.ps.recipes import Recipe
from echelon.ps.service import Peer, Request
from echelon.ps.shard import Shard
from echelon.ps.steps import Updates, parts_from
from echelon.ps.together import sense

NAME = "copy"

KEPT = 256
"""Of the last updates that moved nothing."""

Part = tuple[dict[str, Any], dict[int, Tensor]]
"""What a worker said of its part of an update, and its gradients by key."""


@dataclass
class Copy:
    """One model's part in a shard. Whatever changes it holds the lock, and tells the partner in the same order."""

    shard: Shard
    updates: Updates
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: dict[int, int] = field(default_factory=dict)
    """Worker -> the number of its last operation that an update here has in it: asked for again, it is answered and not done again."""
    broken: str = ""
    """Why a copy is of no use: something failed on the way."""
    held: dict[tuple[int, int], Part] = field(default_factory=dict)
    """(Worker, number) -> a part that waits until it is known whether it counts (parts.py)."""
    not_made: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Version -> what workers are told, of the last of those updates that moved nothing."""

    def hold(self, worker: int, head: dict[str, Any], gradients: Mapping[int, Tensor]) -> None:
        """Copies them."""
        mine = {key: x.clone() for key, x in gradients.items()}
        self.held[worker, int(head["number"])] = (dict(head), mine)

    def let_go(self) -> None:
        """Parts of an older version than this can never count."""
        newest = self.shard.updates
        self.held = {at: part for at, part in self.held.items() if int(part[0]["version"]) >= newest}

    def passed_over(self, version: int, told: dict[str, Any]) -> None:
        self.not_made[version] = told
        for old in list(self.not_made)[:-KEPT]:
            del self.not_made[old]

    def values_for(self, request: Request) -> list[Tensor]:
        """All values, for a worker that has room for them and does not pull them afterwards."""
        return [self.shard.memory] if request.out_bytes else []


class Copies:
    """Everything that one server holds. Locked by whoever changes what is led or in which epoch."""

    def __init__(self, rank: int, num_workers: int, num_servers: int, leads: bool = True) -> None:
        self.rank, self.num_workers, self.num_servers = rank, num_workers, num_servers
        self.lock = threading.Lock()
        self.held: dict[tuple[int, int], Copy] = {}
        self.leading: dict[int, int] = {rank: 0} if leads else {}
        """Shard -> the epoch since which it is led here."""
        self.following: dict[int, int] = {}
        """Shard -> the epoch of the leader whose copy this is."""
        self.notes: dict[int, tuple[tuple[int, int], dict[str, Any]]] = {}
        """Shard -> what its leader decided beside the models' updates (noting.py), with the leader's epoch and its number."""

    def note(self, shard: int, at: tuple[int, int], record: dict[str, Any]) -> None:
        """The newest replaces the one before, in whichever order they come."""
        with self.lock:
            if shard not in self.notes or self.notes[shard][0] < at:
                self.notes[shard] = (at, record)

    def of(self, request: Request) -> Copy:
        """What a worker's call is about."""
        shard = self.shard_of(request)
        if shard not in self.leading:
            raise PeerLost(f"server {self.rank} does not serve shard {shard}: another does")
        return self.held[shard, int(request.head["model"])]

    def shard_of(self, request: Request) -> int:
        return int(request.head.get("shard", self.rank))

    def of_shard(self, shard: int) -> dict[int, Copy]:
        """By model."""
        return {model: copy for (s, model), copy in list(self.held.items()) if s == shard}

    def make(self, spec: Sequence[Any], memory: Tensor) -> Copy:
        shard = Shard(spec, memory, self.num_workers, keeps=self.num_servers > 1)
        return Copy(shard, Updates(shard))

    def take_over(self, shard: int, epoch: int) -> bool:
        """This server leads the shard from this epoch on; False if it did already. What an older leader still sends is refused."""
        with self.lock:
            if self.leading.get(shard, -1) >= epoch:
                return False
            if shard not in self.following and shard != self.rank:
                raise UsageError(f"server {self.rank} has no copy of shard {shard}")
            self.following.pop(shard, None)
            self.leading[shard] = epoch
            return True


class Copying:
    """The service that a leader calls (service.Service): every change of a shard, in order, over one connection.

    An update that lies in shared memory of which two take turns is acknowledged when it is here, and made before the next one is read:
    so the memory that it lies in is free once the one after it is acknowledged.
    """

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self._verbs: dict[str, Callable[[Copy, Request], None]] = {
            "update": self._update,
            "values": lambda copy, r: copy.shard.overwrite(r.tensors[0], str(r.peer)),
            "load": self._load,
            "undo": self._undo,
            "begin": lambda copy, r: copy.done.clear(),
            "hold": _hold,
            "pass": lambda copy, r: copy.passed_over(int(r.head["version"]), dict(r.head["told"])),
        }

    def called(self, request: Request) -> None:
        if request.peer.role != "server":
            raise UsageError(
                f"{request.peer} called {request.verb} of {NAME}, which servers offer each other"
            )
        with sense(request):
            self._follow(request)

    def _follow(self, request: Request) -> None:
        shard, epoch = int(request.head["shard"]), int(request.head["epoch"])
        with self.copies.lock:
            known = max(self.copies.following.get(shard, -1), self.copies.leading.get(shard, -1))
            if epoch < known or shard in self.copies.leading:
                raise PeerLost(f"{request.peer} does not lead shard {shard} any more")
            self.copies.following[shard] = epoch
        if request.verb in ("fill", "note"):
            if request.verb == "fill":
                self._fill(shard, request)
            else:
                self.copies.note(shard, (epoch, int(request.head["number"])), dict(request.head["record"]))
            request.answer()
            return
        copy = self.copies.held.get((shard, int(request.head["model"])))
        if copy is None or copy.broken:
            raise UsageError(f"there is no whole copy here: {copy.broken if copy else 'it was not filled'}")
        act = self._verbs.get(request.verb)
        if act is None:
            raise UsageError(f"servers do not offer each other {request.verb}")
        early = request.lasting and bool(request.head.get("turns"))
        if early:
            request.answer()
        try:
            with copy.lock:
                act(copy, request)
        except Exception as error:
            copy.broken = f"{request.verb} failed: {type(error).__name__} {error}"
            raise
        if not early:
            request.answer()

    def gone(self, peer: Peer) -> None:
        pass

    def _fill(self, shard: int, request: Request) -> None:
        head = request.head
        copy = self.copies.make([tuple(r) for r in head["ranges"]], request.tensors[0])
        num_own = len(request.tensors) - sum(len(keys) for *_, keys in head["held"])
        copy.shard.restore(head, request.tensors[:num_own])
        gradients = iter(request.tensors[num_own:])
        for worker, part, keys in head["held"]:
            copy.hold(int(worker), part, {int(key): next(gradients) for key in keys})
        copy.not_made = {int(version): dict(told) for version, told in head["not_made"]}
        copy.updates.next = int(head["next"])
        copy.done = {int(rank): int(number) for rank, number in head["done"]}
        self.copies.held[shard, int(head["model"])] = copy

    def _update(self, copy: Copy, request: Request) -> None:
        head = request.head
        groups = [(Recipe.from_plain(recipe), float(factor), keys) for recipe, factor, keys in head["groups"]]
        sums: dict[int, Tensor] = {}
        for keys, tensor in zip(head["keys"], request.tensors, strict=True):
            sums |= copy.shard.split(keys, tensor, str(request.peer))
        copy.shard.step(int(head["optimizer"]), groups, lambda key, _: sums[key], since=since_of(head))
        copy.done.update((int(rank), int(number)) for rank, number in head["done"])
        copy.updates.next = int(head["next"])
        copy.let_go()
        if copy.shard.updates != int(head["updates"]):
            raise WireError(f"update {head['updates']} came after {copy.shard.updates - 1}")

    def _undo(self, copy: Copy, request: Request) -> None:
        copy.shard.undo()
        if copy.shard.updates != int(request.head["updates"]):
            raise WireError(
                f"the leader went back to update {request.head['updates']}, and this copy to {copy.shard.updates}"
            )

    def _load(self, copy: Copy, request: Request) -> None:
        copy.shard.load(*loaded(request))


def since_of(head: Mapping[str, Any]) -> int | None:
    """The iteration that an update belongs to, if it names one: see Shard.step."""
    since = head.get("since")
    return None if since is None else int(since)


def loaded(request: Request) -> tuple[int, dict[int, Recipe], Any, list[Tensor]]:
    """The arguments of Shard.load."""
    head = request.head
    recipes = {key: Recipe.from_plain(plain) for plain, keys in head["recipes"] for key in keys}
    return int(head["optimizer"]), recipes, head["state"], request.tensors


def _hold(copy: Copy, request: Request) -> None:
    part = dict(request.head["part"])
    copy.hold(int(request.head["worker"]), part, parts_from(copy.shard, part["keys"], request))
