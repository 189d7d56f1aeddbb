"""Writing a plain state dict: whole or not at all, and never the model in one rank's memory.

1. make: rank 0 makes a partial file beside the target and reserves its space
2. look: ranks that see that very file write into it themselves; the others send their blocks to rank 0
3. fill: each rank writes what it holds; of copies the lowest rank
4. replace: if all could, rank 0 adds the header and gives the file its name; if one could not, nothing is replaced
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon import activity
from echelon.checkpoint.store import no_room
from echelon.clock import Deadline
from echelon.comm.group import Group, Lost, Outcome
from echelon.errors import PeerLost, UsageError
from echelon.parallel.exchange import Exchange
from echelon.prepare import stream
from echelon.prepare.partial import Partial
from echelon.prepare.stream import BLOCK_BYTES, Block, Entry, Table

if TYPE_CHECKING:
    from echelon.prepared import Prepared

PICKLED = (".pt", ".pth", ".bin")
LIMIT_S = 1800.0
TAG = 7101
BLOCK, OVER = 0, 1
"""What a rank sends: [kind, at, length, period, bytes], then the bytes."""


def target(path: str | Path) -> Path:
    """The file that run.save will write: `.safetensors` is appended if there is no suffix."""
    path = Path(path)
    return path if path.suffix else path.with_name(path.name + ".safetensors")


def save(prepared: Prepared, model: nn.Module, path: Path, exchange: Exchange) -> None:
    """run.save: the model's own names, with ema the averaged weights. `exchange` is of those that save where the model is whole."""
    world, average = prepared.world, prepared.averages.get(id(model))
    index = next(i for i, known in enumerate([*prepared.models, model]) if known is model)
    prefix = f"model{index}/" if index else ""
    there = prepared.placed_buffers.items()
    buffers = {name.removeprefix(prefix): lies for name, lies in there if name.startswith(prefix)}
    split = bool(buffers) or any(id(p) in prepared.placed for p in model.parameters())
    if split or world.gradients is not world.everyone:
        exchange = Exchange(world.everyone, _raise)
    shadows = {id(p): s for p, s in zip(average.live, average.shadow, strict=True)} if average else {}
    rank = prepared.seat[0]
    found = stream.entries(model, rank, prepared.placed, buffers, shadows)
    write_once(found, path, exchange, split, writes=rank == 0)


@activity.named("run.save")
def write_once(
    entries: Sequence[Entry], path: Path, exchange: Exchange, split: bool, *, writes: bool = True
) -> None:
    """Every rank returns when the file is there, or raises what a rank met. Where the model is whole, the one that `writes` does so alone;
    where it is `split`, all fill the file, and a peer that is lost meanwhile is a PeerLost."""
    if split and path.suffix in PICKLED:
        raise UsageError(
            f"{path} would be a pickle, which one rank writes from its own memory, and this model is split over ranks",
            remedy=f"Save it as {path.with_suffix('.safetensors').name}: that is filled by all ranks at once.",
        )
    if split:
        _together(Table(entries), path, exchange)
        return
    failure: list[str] = []
    if writes:
        try:
            write(entries, path)
        except (OSError, UsageError) as error:
            failure = [_reason(exchange.group.rank, error, path)]
    _refuse(exchange.words(failure), path)


def write(entries: Sequence[Entry], path: Path) -> None:
    """safetensors, or torch.save for .pt, .pth and .bin. A crash in the middle leaves the old file as it was."""
    if path.suffix in PICKLED:
        with _making(path, 1) as (partial, _):
            torch.save({e.name: e.tensor.cpu() for e in entries}, partial.path)
            partial.replace(path, b"")
        return
    table = Table(entries)
    with _making(path, table.num_bytes) as (partial, _):
        for block in table.blocks():
            partial.put(block)
        partial.replace(path, table.header)


@contextlib.contextmanager
def _making(path: Path, num_bytes: int) -> Any:
    partial, word = Partial.make(path, num_bytes)
    try:
        yield partial, word
    finally:
        partial.discard()


def _together(table: Table, path: Path, exchange: Exchange) -> None:
    group = exchange.group
    partial: Partial | None = None
    try:
        # make
        failure: list[str] = []
        digest = hashlib.sha256(table.header).hexdigest()
        if group.rank == 0:
            try:
                partial, word = Partial.make(path, table.num_bytes)
                failure = [json.dumps({**word, "digest": digest})]
            except OSError as error:
                failure = [_reason(0, error, path)]
        said = exchange.words(failure)
        if not said[0].startswith("{"):
            _refuse(said, path)
        # look
        word = json.loads(said[0])
        partial = partial or Partial.find(word)
        sends = partial is None and any(entry.runs for entry in table.entries)
        senders = [int(rank) for rank in exchange.words([f"{group.rank:06d}"] if sends else [])]
        # fill
        failure = (
            [] if word["digest"] == digest else [f"rank {group.rank} has other tensors to save than rank 0"]
        )
        if not failure:
            failure = (
                _attempt(lambda: _fill(table, partial, group), group.rank, path) if partial or sends else []
            )
        if sends:
            _met(group.send(_frame(OVER, group), 0, TAG).wait(Deadline.after(LIMIT_S)))
        if group.rank == 0 and partial is not None:
            failure += [why for rank in senders for why in _receive(rank, partial, table, group, path)]
        _refuse(exchange.words(failure), path)
        # replace
        failure = (
            _attempt(lambda: partial.replace(path, table.header), 0, path)
            if partial and group.rank == 0
            else []
        )
        _refuse(exchange.words(failure), path)
    finally:
        if partial is not None:
            partial.discard() if group.rank == 0 else partial.close()


def _fill(table: Table, partial: Partial | None, group: Group) -> None:
    for block in table.blocks():
        if partial is not None:
            partial.put(block)
            continue
        data = torch.from_numpy(block.data).to(group.buffer(0).device)
        for x in (_frame(BLOCK, group, block.at, block.length, block.period, len(data)), data):
            _met(group.send(x, 0, TAG).wait(Deadline.after(LIMIT_S)))


def _receive(sender: int, partial: Partial, table: Table, group: Group, path: Path) -> list[str]:
    """Writes what a rank sends, until it is over. What cannot be written is still taken, so that the sender comes to its end."""
    head, room = (
        _frame(BLOCK, group),
        torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=group.buffer(0).device),
    )
    failure: list[str] = []
    while True:
        _met(group.recv(head, sender, TAG).wait(Deadline.after(LIMIT_S)))
        kind, at, length, period, num_bytes = head.tolist()
        if kind == OVER:
            return failure
        rows = num_bytes // length if length > 0 else 0
        end = at + (rows - 1) * period + length
        inside = len(table.header) <= at and end <= table.num_bytes and 0 < num_bytes <= BLOCK_BYTES
        if not inside or rows * length != num_bytes or period < 0:
            raise UsageError(
                f"rank {sender} sent {num_bytes} bytes for places {at} to {end} of {table.num_bytes}"
            )
        _met(group.recv(room[:num_bytes], sender, TAG).wait(Deadline.after(LIMIT_S)))
        block = Block(at, length, period, room[:num_bytes].cpu().numpy())
        failure = failure or _attempt(lambda block=block: partial.put(block), 0, path)  # type: ignore[misc]


def _frame(
    kind: int, group: Group, at: int = 0, length: int = 0, period: int = 0, num_bytes: int = 0
) -> torch.Tensor:
    return torch.tensor([kind, at, length, period, num_bytes], device=group.buffer(0).device)


def _attempt(act: Callable[[], None], rank: int, path: Path) -> list[str]:
    """What went wrong, as words for the others: they must not wait for a rank that gave up."""
    try:
        act()
        return []
    except PeerLost:
        raise
    except Exception as error:
        return [_reason(rank, error, path)]


def _reason(rank: int, error: Exception, path: Path) -> str:
    full = no_room(error, path.parent) if isinstance(error, OSError) else ""
    return f"rank {rank}: {full or f'{type(error).__name__}: {error}'}".replace("\n", " ")


def _refuse(said: list[str], path: Path) -> None:
    if said:
        raise UsageError(
            f"{path} could not be written: {said[0]}",
            remedy="Nothing was replaced. Free some space, make its folder writable, or choose another path.",
        )


def _met(outcome: Outcome) -> None:
    if isinstance(outcome, Lost):
        _raise(outcome)


def _raise(outcome: Outcome) -> None:
    assert isinstance(outcome, Lost)
    raise PeerLost(f"a peer was lost while the model was saved: {outcome.reason}", peers=outcome.peers)
