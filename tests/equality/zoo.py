"""Equality models, data and the loop in plain torch that every strategy must match.

No bias before BatchNorm, no key bias in attention, no dropout: where a true gradient is 0, adaptive optimizers amplify
rounding. Everything is float64.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

D = torch.float64
SAMPLES, BATCH, EPOCHS = 22, 5, 2  # batches of 5, 5, 5, 5 and 2: the last is smaller than four workers


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
        self.never = nn.Linear(3, 3)  # used by nobody: must keep grad None and its weights
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.body(self.frozen(x))


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n1 = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.b, self.n2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        x = torch.tanh(self.n1(self.a(x)))
        x = x + torch.tanh(self.n2(self.b(x)))
        return self.head(x.mean((2, 3)))


class Transformer(nn.Module):
    """One block with causal attention and tied input and output embeddings."""

    def __init__(self, vocab=11, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocab, width)
        self.qkv, self.mix = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.out = nn.Linear(width, vocab, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.mix(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, w)
        )
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.out(x)


class Table(nn.Module):
    """A sparse embedding under a small net."""

    def __init__(self):
        super().__init__()
        self.rows = nn.EmbeddingBag(40, 5, mode="mean", sparse=True)
        self.head = nn.Linear(5, 4)

    def forward(self, ids):
        return self.head(self.rows(ids))


def mean_ce(out, y):
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))


def make(kind):
    """(model, dataset) in float64, the same every time."""
    torch.manual_seed(3)
    g = torch.Generator().manual_seed(1)
    y = torch.randint(0, 4, (SAMPLES,), generator=g)
    if kind == "mlp":
        return MLP().to(D), TensorDataset(torch.randn(SAMPLES, 6, generator=g, dtype=D), y)
    if kind == "cnn":
        return CNN().to(D), TensorDataset(torch.randn(SAMPLES, 1, 5, 5, generator=g, dtype=D), y)
    if kind == "transformer":
        text = torch.randint(0, 11, (SAMPLES, 7), generator=g)
        return Transformer().to(D), TensorDataset(text[:, :-1], text[:, 1:])
    return Table().to(D), TensorDataset(torch.randint(0, 40, (SAMPLES, 3), generator=g), y)


def optimizer_for(name, model, steps):
    """(optimizer, scheduler or None, norm to clip to or None)"""
    params = [p for p in model.parameters() if p.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01), None, None
    if name == "adamw":
        opt = torch.optim.AdamW(params, lr=0.02)
        return opt, torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=steps), 0.5
    return torch.optim.Adagrad(params, lr=0.1), None, None


def loader_for(dataset, **options):
    return DataLoader(
        dataset, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(5), **options
    )


def num_steps(accumulate):
    batches = -(-SAMPLES // BATCH)
    return EPOCHS * -(-batches // accumulate)


def pieces(n, m):
    each, over = divmod(n, m)
    ends = [0]
    for i in range(m):
        ends.append(ends[-1] + each + (i < over))
    return [(a, b) for a, b in itertools.pairwise(ends) if b > a]


def plain_torch(kind, optimizer, accumulate, microbatches):
    """One process, no Echelon: the answer."""
    model, dataset = make(kind)
    opt, scheduler, clip = optimizer_for(optimizer, model, num_steps(accumulate))
    loader = loader_for(dataset)
    for _ in range(EPOCHS):
        batches = list(loader)
        for at in range(0, len(batches), accumulate):
            group = batches[at : at + accumulate]
            total = sum(len(x) for x, _ in group)
            for x, y in group:
                for lo, hi in pieces(len(x), microbatches):
                    loss = mean_ce(model(x[lo:hi]), y[lo:hi])
                    (loss * ((hi - lo) / total)).backward()
            if clip:
                nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], clip)
            opt.step()
            if scheduler:
                scheduler.step()
            opt.zero_grad()
    return {k: v.clone() for k, v in model.state_dict().items()}


PAIRS = [(m, o) for m in ("mlp", "cnn", "transformer") for o in ("sgd", "adamw")] + [("table", "adagrad")]
CELLS = [(m, o, a, u) for m, o in PAIRS for a in (1, 3) for u in (1, 2)]
