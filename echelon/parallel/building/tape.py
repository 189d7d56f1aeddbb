"""The tape: operations of a construction as data, and the real values that they give when they are run again.

A tensor is told by where it lies: a storage's number, and how it is laid out there. So views cost nothing and need no entry, and whatever
Python object stands for a tensor (a Parameter, its `.data`, a slice) is the same thing here. Random operations carry the state in which
they found their generator: run again, at any time and alone, they draw the same numbers."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from echelon.parallel.building.chain import History, Touches


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: in which storage, and how."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Room:
    """A storage: how large, and on which device."""

    nbytes: int
    device: torch.device


@dataclass(frozen=True)
class Draw:
    """A generator as an operation found it."""

    generator: torch.Generator
    state: Tensor


@dataclass(frozen=True)
class Operation:
    func: Callable[..., Any]
    args: Any
    """Positional and keyword arguments; a Place stands where a tensor stood."""

    results: tuple[Place | None, ...]
    """Places of what it gave, in order; None for what is no tensor."""

    draw: Draw | None = None


Storages = dict[int, torch.UntypedStorage]


class Tape:
    """Operations in order, with the storages that they touch."""

    def __init__(self) -> None:
        self.history = History()
        self.operations: list[Operation] = []
        self.rooms: list[Room] = []
        self.constants: Storages = {}
        """Real values that came in from outside, by storage."""

    def room(self, nbytes: int, device: torch.device) -> int:
        """A new storage's number."""
        self.rooms.append(Room(nbytes, device))
        return len(self.rooms) - 1

    def constant(self, value: Tensor) -> Place:
        """A copy of a real tensor, as part of the tape."""
        copy = value.detach().clone()
        storage = copy.untyped_storage()
        number = self.room(storage.nbytes(), copy.device)
        self.constants[number] = storage
        return Place(number, tuple(copy.shape), copy.stride(), int(copy.storage_offset()), copy.dtype)

    def add(self, operation: Operation, touches: Touches) -> None:
        self.operations.append(operation)
        self.history.add(touches)

    def values(self, places: list[Place]) -> list[Tensor]:
        """Real tensors for these places as they are now. Blocks while it computes; memory: these, and what is needed on the way."""
        chain = self.history.chain({place.storage for place in places})
        held: Storages = {}
        freed: dict[int, list[int]] = {}
        for storage, position in chain.last_use.items():
            freed.setdefault(position, []).append(storage)
        with torch.no_grad():
            for position, number in enumerate(chain.operations):
                self._run(self.operations[number], self.history.touches[number], held)
                for storage in freed.get(position, ()):
                    held.pop(storage, None)
            found = [self._tensor(place, held) for place in places]
        give_back(sum(self.rooms[storage].nbytes for storage in chain.last_use))
        return [t.clone() if p.storage in self.constants else t for p, t in zip(places, found, strict=True)]

    def digest(self) -> int:
        """A number that is the same on all ranks whose constructions were the same, generators included."""
        found = hashlib.blake2b(digest_size=7)
        for operation in self.operations:
            args = pytree.tree_map(_plain, operation.args)
            found.update(str((operation.func, args, operation.results)).encode())
            if operation.draw is not None:
                found.update(operation.draw.state.numpy().tobytes())
        for storage in self.constants.values():
            found.update(bytes(torch.empty(0, dtype=torch.uint8).set_(storage.cpu()).numpy()))  # type: ignore[call-overload]
        return int.from_bytes(found.digest(), "big")

    def _run(self, operation: Operation, touches: Touches, held: Storages) -> None:
        args, kwargs = pytree.tree_map_only(Place, lambda place: self._tensor(place, held), operation.args)
        with _drawing(operation.draw):
            result = operation.func(*args, **kwargs)
        for place, value in zip(operation.results, pytree.tree_leaves(result), strict=True):
            if place is not None and place.storage in touches.creates:
                held[place.storage] = _laid_out(value, place, self.rooms[place.storage])

    def _tensor(self, place: Place, held: Storages) -> Tensor:
        storage = held.get(place.storage, self.constants.get(place.storage))
        if storage is None:
            room = self.rooms[place.storage]
            storage = held[place.storage] = torch.UntypedStorage(room.nbytes, device=room.device)
        empty = torch.empty(0, dtype=place.dtype, device=storage.device)
        return empty.set_(storage, place.offset, place.size, place.stride)  # type: ignore[call-overload, no-any-return]


def give_back(nbytes: int) -> None:
    """Freed memory of this size goes back to the system: the C library keeps blocks of some MiB, and a process that makes a model tensor
    by tensor grew by a multiple of the largest one."""
    if nbytes >= 1 << 20 and _trim is not None:
        _trim(0)


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def _laid_out(value: Tensor, place: Place, room: Room) -> torch.UntypedStorage:
    """The storage of `value`, laid out as it was recorded (a kernel may have chosen otherwise)."""
    same = (
        tuple(value.stride()) == place.stride
        and value.storage_offset() == place.offset
        and value.untyped_storage().nbytes() >= room.nbytes
    )
    if same:
        return value.untyped_storage()
    storage = torch.UntypedStorage(room.nbytes, device=room.device)
    empty = torch.empty(0, dtype=place.dtype, device=storage.device)
    empty.set_(storage, place.offset, place.size, place.stride).copy_(value)  # type: ignore[call-overload]
    return storage


def _plain(leaf: Any) -> Any:
    """An argument without what differs from rank to rank though it means the same: an address, a device's number."""
    if isinstance(leaf, torch.Generator):
        return "generator"
    return leaf.type if isinstance(leaf, torch.device) else leaf


class _drawing:
    """The generator of a draw is as it was then, and afterwards as it is now."""

    def __init__(self, draw: Draw | None) -> None:
        self.draw = draw

    def __enter__(self) -> None:
        if self.draw is not None:
            self.now = self.draw.generator.get_state()
            self.draw.generator.set_state(self.draw.state)

    def __exit__(self, *error: object) -> None:
        if self.draw is not None:
            self.draw.generator.set_state(self.now)
