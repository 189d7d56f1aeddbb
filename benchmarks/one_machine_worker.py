"""A process of one_machine.py: the same training as a plain PyTorch loop and with the lines that Echelon wants.

one_machine_worker.py plain|echelon MODEL FOLDER. It reads numbers of steps from FOLDER/go-RANK, and writes the seconds that they took to FOLDER/took-RANK.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
import models


class GPT(nn.Module):
    """Four layers of width 128 over 64 characters of a hundred: 0.8 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(100, 128), nn.Parameter(torch.zeros(1, 64, 128))
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(128, 100)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(64))

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.body(self.embed(ids) + self.place, mask=self.mask, is_causal=True))


def convnet() -> nn.Module:
    """Three convolutions with BatchNorm over images of 32 × 32: 0.1 M parameters."""
    layers: list[nn.Module] = []
    for cin, cout in ((3, 32), (32, 64), (64, 128)):
        layers += [
            nn.Conv2d(cin, cout, 3, 1, 1, bias=False),
            nn.BatchNorm2d(cout),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


def case(name: str) -> tuple[nn.Module, TensorDataset, int]:
    """(model, data, samples a step)"""
    torch.manual_seed(0)
    if name == "gpt":
        text = torch.randint(0, 100, (512, 65))
        return GPT(), TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous()), 32
    if name == "mlp":
        return models.mlp(), TensorDataset(torch.randn(8192, 256), torch.randint(0, 100, (8192,))), 256
    return convnet(), TensorDataset(torch.randn(2048, 3, 32, 32), torch.randint(0, 10, (2048,))), 64


def forever(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def stepper(
    loader: DataLoader[Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    batches = forever(loader)

    def step() -> None:
        x, y = next(batches)
        out = model(x)
        loss = F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    side, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if side == "echelon":
        import echelon

        run = echelon.init()
    model, data, batch = case(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(data, batch, shuffle=True, drop_last=True)
    if side == "echelon":
        model, optimizer, loader = run.prepare(model, optimizer, loader)
    step = stepper(loader, model, optimizer)
    rank = os.environ.get("RANK", "0")
    with (folder / f"go-{rank}").open() as go, (folder / f"took-{rank}").open("w", buffering=1) as took:
        for line in go:
            began = time.perf_counter()
            for _ in range(int(line)):
                step()
            took.write(f"{time.perf_counter() - began}\n")
            if not int(line):
                break


main()
