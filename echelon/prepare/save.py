"""Writing a plain state dict: whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor


def target(path: str | Path) -> Path:
    """The file that run.save will write: `.safetensors` is appended if there is no suffix."""
    path = Path(path)
    return path if path.suffix else path.with_name(path.name + ".safetensors")


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
