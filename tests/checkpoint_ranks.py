"""Ranks as threads that save a checkpoint together, for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from echelon.checkpoint.holding import Holding
from echelon.checkpoint.load import Saved
from echelon.checkpoint.meeting import Room, alone
from echelon.checkpoint.saver import Checkpoint, Saver
from echelon.clock import Deadline
from echelon.mesh.layout import Key, Span

SOON_S = 60.0


def whole(state: Mapping[str, Tensor], size: int, **fields: Any) -> list[Holding]:
    """Data parallel: every rank holds everything."""
    every = tuple(range(size))
    return [Holding(Key(n), t, Span.whole(tuple(t.shape)), every, **fields) for n, t in state.items()]


def cut(name: str, tensor: Tensor, bounds: list[int], rank: int) -> Holding:
    """Sharded: rank r holds elements [bounds[r], bounds[r + 1]) and nobody else does."""
    start, stop = bounds[rank], bounds[rank + 1]
    return Holding(Key(name), tensor.reshape(-1)[start:stop], Span(tuple(tensor.shape), start, stop), (rank,))


def together(size: int, act: Callable[[int], Any]) -> list[Any]:
    """act(rank) on `size` threads; their results, or what the first of them raised."""
    results: dict[int, Any] = {}

    def body(rank: int) -> None:
        try:
            results[rank] = act(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SOON_S)
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[rank] for rank in range(size)]


def save(
    target: Any, step: int, held: Callable[[int], list[Holding]], size: int = 1, *, objects: Any = None, keep: int = 2, emit: Any = None
) -> list[Checkpoint]:  # fmt: skip
    """One checkpoint by `size` ranks: their handles, over. Objects: a tree, or a function of the rank."""
    room = Room(size)

    def act(rank: int) -> Checkpoint:
        saver = Saver(target, rank, size, room.meeting(rank), emit or (lambda event: None), keep=keep)
        tree = objects(rank) if callable(objects) else objects
        checkpoint = saver.save(step, held(rank), tree, {"size": size})
        saver.before_change()
        saver.finish(Deadline.after(SOON_S))
        saver.close()
        return checkpoint

    return together(size, act)


def save_alone(target: Any, step: int, state: Mapping[str, Tensor], **options: Any) -> Checkpoint:
    return save(target, step, lambda rank: whole(state, 1), **options)[0].wait(Deadline.after(SOON_S))


def read(saved: Saved, name: str, slot: str = "value") -> Tensor:
    key = Key(name, slot)
    out = torch.empty(saved.shape(key), dtype=saved.dtype(key))
    saved.read(key, out)
    return out


def bits(tensor: Tensor) -> bytes:
    """The elements as bytes, in order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


__all__ = ["Room", "alone", "bits", "cut", "read", "save", "save_alone", "together", "whole"]
