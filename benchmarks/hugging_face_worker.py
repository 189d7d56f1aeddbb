"""A script as a user writes it: trains one model of hugging_face.py and leaves its weights.

hugging_face_worker.py NAME WEIGHTS [--plain [--parts 2,2,3,3]] [--optimizer sgd|adamw] [--epochs N] [--pause SECONDS]

--plain is the loop in PyTorch alone, --parts the same with the batch of each step in so many parts (the last number holds on); the other one is for every form. Batches of 7 of 26 samples: two workers get 4 and 3, and 3 and 2 of the last one.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
import hugging_face

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
}


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, loss_fn: Any, epochs: int) -> None:
    for _ in range(epochs):
        for inputs, target in loader:
            loss = loss_fn(model(**inputs), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def in_parts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    loss_fn: Any,
    epochs: int,
    parts: list[int],
) -> None:
    """Each part's gradient is that of its own mean, and is weighted behind its backward."""
    params = [p for p in model.parameters() if p.requires_grad]
    for _ in range(epochs):
        for inputs, target in loader:
            total: list[Any] = [None] * len(params)
            for part in torch.arange(len(target)).tensor_split(parts[0]):
                loss = loss_fn(model(**{name: x[part] for name, x in inputs.items()}), target[part])
                weight = len(part) / len(target)
                for i, grad in enumerate(torch.autograd.grad(loss, params, allow_unused=True)):
                    if grad is not None:
                        total[i] = grad * weight + (0 if total[i] is None else total[i])
            for p, grad in zip(params, total, strict=True):
                p.grad = grad
            optimizer.step()
            parts = parts[1:] or parts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("weights")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--parts", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0)
    asked = parser.parse_args()
    model, samples, loss_fn = hugging_face.make(asked.name)
    optimizer = OPTIMIZERS[asked.optimizer](model.parameters())
    loader = DataLoader(samples, batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(0))
    model.train()
    if asked.plain:
        save_file({k: v.clone() for k, v in model.state_dict().items()}, asked.weights + ".start")
        if asked.parts:
            in_parts(model, optimizer, loader, loss_fn, asked.epochs, asked.parts)
        else:
            plain(model, optimizer, loader, loss_fn, asked.epochs)
        save_file({k: v.clone() for k, v in model.state_dict().items()}, asked.weights)
        return

    import echelon

    run = echelon.init()
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for _ in run.epochs(asked.epochs):
        for batch in loader:
            run.step(loss_fn, batch)
            run.print("step", run.global_step)
            time.sleep(asked.pause)
    run.save(asked.weights)


main()
