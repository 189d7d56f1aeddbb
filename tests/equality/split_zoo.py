"""Models for forms that split them, and the loop in plain torch: those of zoo.py, a deeper one with tied embeddings, one with two inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tests.equality import zoo

KINDS = ("mlp", "cnn", "gpt", "pair")


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, w)
        x = x + self.mix(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Two blocks in a list, tied input and output embeddings, a single number that scales the output."""

    def __init__(self, vocab=11, width=8, heads=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.out = nn.Linear(width, vocab, bias=False)
        self.out.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.out(x) * self.scale


class Pair(nn.Module):
    """An encoder with two inputs: words and numbers, each by a way of its own."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.numbers = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 6))
        self.both = nn.Sequential(nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 4))

    def forward(self, ids, x):
        return self.both(torch.cat([self.words(ids).mean(1), self.numbers(x)], 1))


def make(kind):
    """(model, dataset) in float64, the same every time."""
    if kind not in ("gpt", "pair"):
        return zoo.make(kind)
    torch.manual_seed(3)
    g = torch.Generator().manual_seed(1)
    text = torch.randint(0, 11, (zoo.SAMPLES, 7), generator=g)
    if kind == "gpt":
        return GPT().to(zoo.D), TensorDataset(text[:, :-1], text[:, 1:])
    x = torch.randn(zoo.SAMPLES, 3, generator=g, dtype=zoo.D)
    return Pair().to(zoo.D), TensorDataset(text, x, torch.randint(0, 4, (zoo.SAMPLES,), generator=g))


def loss_of(model, batch):
    *inputs, target = batch
    return zoo.mean_ce(model(*inputs), target)


def plain_torch(kind, optimizer, accumulate, microbatches):
    """One process, no Echelon: the answer."""
    model, dataset = make(kind)
    opt, scheduler, clip = zoo.optimizer_for(optimizer, model, zoo.num_steps(accumulate))
    loader = zoo.loader_for(dataset)
    for _ in range(zoo.EPOCHS):
        batches = list(loader)
        for at in range(0, len(batches), accumulate):
            group = batches[at : at + accumulate]
            total = sum(len(batch[0]) for batch in group)
            for batch in group:
                for lo, hi in zoo.pieces(len(batch[0]), microbatches):
                    loss = loss_of(model, [part[lo:hi] for part in batch])
                    (loss * ((hi - lo) / total)).backward()
            if clip:
                nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], clip)
            opt.step()
            if scheduler:
                scheduler.step()
            opt.zero_grad()
    return {k: v.clone() for k, v in model.state_dict().items()}
