"""Writing a plain state dict: whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from echelon import activity
from echelon.errors import UsageError
from echelon.parallel.exchange import Exchange


def target(path: str | Path) -> Path:
    """The file that run.save will write: `.safetensors` is appended if there is no suffix."""
    path = Path(path)
    return path if path.suffix else path.with_name(path.name + ".safetensors")


@activity.named("run.save")
def write_once(state: dict[str, Tensor], path: Path, exchange: Exchange) -> None:
    """Rank 0 writes; every rank returns when the file is there, or raises what rank 0 met."""
    failure: list[str] = []
    if exchange.group.rank == 0:
        try:
            write(state, path)
        except OSError as error:
            failure = [f"{type(error).__name__}: {error}".replace("\n", " ")]
    said = exchange.words(failure)
    if said:
        raise UsageError(
            f"rank 0 could not write {path}: {said[0]}", remedy="Nothing was replaced; choose another path."
        )


def write(state: dict[str, Tensor], path: Path) -> None:
    """safetensors, or torch.save for .pt, .pth and .bin. A crash in the middle leaves the old file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            if path.suffix in (".pt", ".pth", ".bin"):
                torch.save({k: v.cpu() for k, v in state.items()}, file)
            else:
                from safetensors.torch import save

                file.write(save({k: v.detach().cpu().contiguous().clone() for k, v in state.items()}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
