"""The models that step time is measured on, with data that fits memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


def mlp() -> nn.Module:
    """About 1 M parameters."""
    return nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 640), nn.ReLU(), nn.Linear(640, 100)
    )


class Block(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout)
        self.b, self.nb = nn.Conv2d(cout, cout, 3, 1, 1, bias=False), nn.BatchNorm2d(cout)
        self.skip = nn.Identity()
        if stride > 1 or cin != cout:
            self.skip = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.na(self.a(x)))
        return F.relu(self.nb(self.b(y)) + self.skip(x))


def resnet18() -> nn.Module:
    """ResNet-18 for 32 × 32 images: 11.2 M parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    width = 64
    for cout, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers.append(Block(width, cout, stride))
        width = cout
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 100))


class Transformer(nn.Module):
    """About 25 M parameters: 6 layers of width 512, tied embeddings."""

    def __init__(self, vocab: int = 12000, width: int = 512, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.place = nn.Parameter(torch.zeros(1, 64, width))
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, vocab, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(self.embed(ids) + self.place[:, : ids.shape[1]]))


class Tables(nn.Module):
    """Embedding-heavy: 26 tables, 12.8 M rows × 1 … most parameters are rows of which a batch touches few."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20_000, 32, sparse=sparse) for _ in range(13))
        self.top = nn.Sequential(nn.Linear(13 * 32, 128), nn.ReLU(), nn.Linear(128, 2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([t(ids[:, i]) for i, t in enumerate(self.tables)], 1))


def wide() -> nn.Module:
    """25 M parameters in 6 linears: with a tiny batch, next to no computing for its gradients."""
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


ROWS = 196_608


def tables() -> nn.Module:
    """25 M parameters in a table whose gradient is dense: the least computing a parameter can have."""
    return nn.Sequential(nn.Embedding(ROWS, 128), nn.Flatten(), nn.Linear(8 * 128, 64))


class Pair(nn.Module):
    """A residual pair of linears: what tensor parallel splits by columns and rows."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))


def narrow() -> nn.Module:
    """8 bottlenecks: split among ranks, much to exchange for little computing."""
    return nn.Sequential(*(Pair(1024, 16) for _ in range(8)))


def bulge() -> nn.Sequential:
    """Wide where it is cut and narrow at its ends: cut into 2 or 4 stages, much to send for little computing."""
    return nn.Sequential(nn.Linear(16, 2048), nn.ReLU(), nn.Hardtanh(), nn.Linear(2048, 16))


def stack(vocab: int = 1000, width: int = 256, layers: int = 6) -> nn.Sequential:
    """A transformer as a plain list of layers, nothing tied: what can be cut by hand."""
    body = [
        nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(layers)
    ]
    return nn.Sequential(nn.Embedding(vocab, width), *body, nn.Linear(width, vocab))


def blocks() -> nn.Module:
    """2 large pairs: much computing for an exchange."""
    return nn.Sequential(*(Pair(1024, 4096) for _ in range(2)))


def case(name: str) -> tuple[nn.Module, TensorDataset, int, int]:
    """(model, data, batch a worker, steps a round)"""
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    if name == "mlp-1m":
        return (
            mlp(),
            TensorDataset(torch.randn(2048, 256, generator=g), torch.randint(0, 100, (2048,), generator=g)),
            32,
            60,
        )
    if name == "resnet18":
        return (
            resnet18(),
            TensorDataset(
                torch.randn(256, 3, 32, 32, generator=g), torch.randint(0, 100, (256,), generator=g)
            ),
            4,
            3,
        )
    if name == "transformer-25m":
        ids = torch.randint(0, 12000, (256, 33), generator=g)
        return Transformer(), TensorDataset(ids[:, :-1], ids[:, 1:]), 2, 2
    ids = torch.randint(0, 20_000, (2048, 13), generator=g)
    y = torch.randint(0, 2, (2048,), generator=g)
    return Tables(sparse=name.endswith("sparse")), TensorDataset(ids, y), 64, 10


NAMES = ("mlp-1m", "resnet18", "transformer-25m", "embedding-dense", "embedding-sparse")
