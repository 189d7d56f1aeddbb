"""Parameters laid one after the other in one piece of memory, of which every rank keeps an equal stretch (levels 2 and 3 in a pipeline).

Between steps a parameter's data is what this rank keeps of it: some of its elements in a row, maybe none. While a step runs, the same
Parameter is whole, in memory that `gather` fills and `free` gives back: whoever saved it for backward finds it filled again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from echelon.errors import UsageError
from echelon.parallel.pipeline.lending import Uses
from echelon.parallel.sharded.carry import Carrier


@dataclass(frozen=True)
class Member:
    """A parameter of a unit: pure."""

    kind: tuple[object, ...]
    """Only parameters of one kind lie together: type, device, trained or not."""
    nbytes: int
    alone: bool = False
    """In a unit of its own: another stage has it too, and both must cut it alike."""


def stretch(numel: int, ranks: int, rank: int) -> tuple[int, int]:
    """Elements [start, stop) of `rank`: equal parts, the last ones shorter or empty."""
    each = -(-numel // ranks)
    return min(rank * each, numel), min((rank + 1) * each, numel)


def units(calls: Iterable[Sequence[str]], members: Mapping[str, Member], unit_bytes: int) -> list[list[str]]:
    """Names that are gathered together, in the order in which a stage's calls use them first. What one call uses first is never parted,
    and what no call uses comes last."""
    found: list[list[str]] = []
    open_units: dict[tuple[object, ...], list[str]] = {}
    seen: set[str] = set()

    def add(fresh: Iterable[str]) -> None:
        filled: dict[tuple[object, ...], list[str]] = {}
        for name in fresh:
            member = members[name]
            if member.alone:
                found.append([name])
                continue
            if member.kind not in open_units:
                open_units[member.kind] = []
                found.append(open_units[member.kind])
            open_units[member.kind].append(name)
            filled[member.kind] = open_units[member.kind]
        for kind, unit in filled.items():
            if sum(members[n].nbytes for n in unit) >= unit_bytes:
                del open_units[kind]

    for names in calls:
        fresh = [n for n in dict.fromkeys(names) if n in members and n not in seen]
        seen.update(fresh)
        add(fresh)
    open_units.clear()
    add(n for n in members if n not in seen)
    return found


def step_bytes(size: int, ranks: int, copies: int, micros: int, keeps: bool) -> int:
    """Bytes that a rank sends in a step of so many micro-batches, for units of `size` bytes in all: predicted from the sizes alone, each message
    as a ring sends it. A unit whose backward does not need its values (a table, the first layer) is gathered once less."""
    each = (ranks - 1) * size // ranks
    gathers = 1 if keeps else 2 * micros
    among_copies = 2 * (copies - 1) * (size // ranks) // copies
    return gathers * each + micros * (each + among_copies)


@dataclass(frozen=True)
class Laid:
    """The parameters of a rank's stages as units."""

    stages: Mapping[int, Sequence[Sequence[tuple[str, nn.Parameter]]]]
    """Stage -> its units, in the order of its forward. A parameter of several stages is in one unit."""
    names: Mapping[str, nn.Parameter]
    """Parameters by every name that calls know them by."""
    common: frozenset[str]
    """Parameters that several of the stages use."""


def lay(model: nn.Module, params: Iterable[nn.Parameter], uses: Uses, unit_bytes: int) -> Laid:
    """Which of `params` are gathered together."""
    params = list(params)
    ids = {id(p) for p in params}
    names = {n: p for n, p in model.named_parameters(remove_duplicate=False) if id(p) in ids}
    first = {id(p): n for n, p in reversed(names.items())}
    tied = {id(names[n]) for n in uses.tied if n in names}
    members = {
        first[id(p)]: Member((p.dtype, p.device, p.requires_grad), p.nbytes, id(p) in tied) for p in params
    }
    calls = {
        stage: [[first[id(names[n])] for n in call if n in names] for call in each]
        for stage, each in uses.calls.items()
    }
    stages: dict[int, list[list[tuple[str, nn.Parameter]]]] = {}
    seen: set[str] = set()
    common: set[str] = set()
    for stage, mine in calls.items():
        here = {n for call in mine for n in call}
        common |= here & seen
        rest = stage == list(calls)[-1]  # takes what no call uses
        fresh = {n: m for n, m in members.items() if n not in seen and (n in here or rest)}
        seen |= set(fresh)
        stages[stage] = [[(n, names[n]) for n in unit] for unit in units(mine, fresh, unit_bytes)]
    return Laid(stages, names, frozenset(common))


class Slot:
    """One parameter of a unit."""

    __slots__ = ("at", "index", "name", "numel", "param", "part", "shape", "start", "stop", "used", "whole")

    def __init__(self, index: int, name: str, param: nn.Parameter, at: int) -> None:
        self.index, self.name, self.param, self.at = index, name, param, at
        self.shape, self.numel = tuple(param.shape), param.numel()
        self.start = self.stop = 0
        """Elements of it that are this rank's."""
        self.used = False
        """It got a gradient that counts since the last meeting, here."""
        self.part = self.whole = param.data


class Unit:
    """Parameters that are gathered, and whose gradients leave, in one message. `open` and `close` surround a step."""

    def __init__(
        self, number: int, params: Sequence[tuple[str, nn.Parameter]], first: int, carrier: Carrier
    ) -> None:
        self.number, self.carrier = number, carrier
        self.slots: list[Slot] = []
        total = 0
        for name, param in params:
            self.slots.append(Slot(first + len(self.slots), name, param, total))
            total += param.numel()
        shards, like = carrier.shards, params[0][1].data
        self.each = max(1, -(-total // shards.size))
        self.mine = like.new_zeros(self.each)
        self.flat = like.new_zeros(self.each * shards.size)
        self.resident = self.opened = self.lost = False
        """Values are here; a step is open; a gathering was lost and may still write: its memory stays."""
        self.grads: Tensor | None = None
        """What this rank's backwards brought and did not send yet, whole."""
        self.pending: Tensor | None = None
        """This rank's stretch of what was summed, provisional."""
        self.sealed: Tensor | None = None
        self._cut()

    @torch.no_grad()
    def _cut(self) -> None:
        """From whole parameters, equal on all ranks, to stretches."""
        begin = self.each * self.carrier.shards.rank
        for slot in self.slots:
            slot.whole = self.flat[slot.at : slot.at + slot.numel].view(slot.shape)
            slot.start = min(max(begin - slot.at, 0), slot.numel)
            slot.stop = min(max(begin + self.each - slot.at, 0), slot.numel)
            offset = slot.at + slot.start - begin
            if slot.start == slot.stop:
                offset = 0
            slot.part = self.mine[offset : offset + slot.stop - slot.start]
            slot.part.copy_(slot.param.data.reshape(-1)[slot.start : slot.stop])
            slot.param.data = slot.part
        self._release()

    @property
    def trains(self) -> bool:
        return any(slot.param.requires_grad for slot in self.slots)

    @property
    def storage(self) -> int:
        """Known by this in the tensors that autograd saves."""
        cdata: int = self.flat.untyped_storage()._cdata
        return cdata

    # -- a step --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Parameters have their whole shapes; not their values yet."""
        if self.opened:
            return
        self.opened = True
        for slot in self.slots:
            found = slot.param.data
            if found.data_ptr() != slot.part.data_ptr() or found.shape != slot.part.shape:
                self._adopt(slot, found)
            slot.param.grad = None
            slot.param.data = slot.whole

    def _adopt(self, slot: Slot, found: Tensor) -> None:
        """Somebody put another tensor there."""
        if found.numel() != slot.part.numel():
            raise UsageError(
                f"`{slot.name}` was given {found.numel()} elements, and this worker keeps {slot.part.numel()} of it",
                remedy="Between steps change parameters in place, or use level=1, where they stay whole.",
            )
        slot.part.copy_(found.reshape(-1))

    def close(self) -> None:
        """Parameters are what this rank keeps of them."""
        if self.opened:
            self.opened = False
            self.free()
            for slot in self.slots:
                slot.param.grad = None
                slot.param.data = slot.part

    @torch.no_grad()
    def gather(self) -> None:
        """Blocks until the values are there; zeros when a peer is lost, which is told at the step's commit."""
        if self.resident:
            return
        shards = self.carrier.shards
        self.carrier.note(2 * self.number)
        self.carrier.sent(self.flat.nbytes, shards.size)
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        work = shards.all_gather(self.flat.view(shards.size, -1), self.mine)
        self.lost = not self.carrier.end(work, self.flat) or self.lost
        self.resident = True

    def free(self) -> None:
        if self.resident:
            self.resident = False
            self._release()

    def _release(self) -> None:
        if not self.lost:
            self.flat.untyped_storage().resize_(0)

    # -- gradients -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take(self, slot: Slot, grad: Tensor) -> None:
        """A gradient that autograd brought: it lies in the unit's message from now on."""
        if self.grads is None:
            self.grads = self.mine.new_zeros(self.each * self.carrier.shards.size)
        room = self.grads[slot.at : slot.at + slot.numel].view(slot.shape)
        room.add_(grad.to_dense() if grad.layout is not torch.strided else grad)

    @torch.no_grad()
    def leave(self) -> None:
        """The message leaves, weighted; zeros where this rank brought nothing."""
        grads, self.grads = self.grads, None
        if grads is None:
            grads = self.mine.new_zeros(self.each * self.carrier.shards.size)
        self.carrier.note(2 * self.number + 1)
        out = torch.empty_like(self.mine)
        self.carrier.reduce(out, grads, now=False, then=self._add)

    def _add(self, part: Tensor) -> None:
        self.pending = part if self.pending is None else self.pending.add_(part)

    def seal(self) -> None:
        if self.pending is not None:
            self.sealed = self.pending if self.sealed is None else self.sealed.add_(self.pending)
            self.pending = None

    def drop(self) -> None:
        self.grads = self.pending = self.sealed = None

    def hand_back(self, used: Sequence[float], closing: float) -> None:
        """`.grad` of each parameter is this rank's part of what was summed; None where no rank had one."""
        total, self.sealed = self.sealed, None
        if total is None:
            return
        if closing != 1.0:
            total.mul_(closing)
        for slot in self.slots:
            if used[slot.index]:
                offset = slot.part.storage_offset()
                slot.param.grad = total[offset : offset + slot.part.numel()]
