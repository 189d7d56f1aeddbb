"""Models whose layers are split, and the loop in plain torch that they must match. Everything is float64, no dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.equality import zoo
from tests.equality.zoo import CNN, MLP, D

SAMPLES, BATCH, EPOCHS = 22, 5, 1


class Attention(nn.Module):
    """As in Hugging Face's models: projections apart, fewer heads of keys and values, no key bias."""

    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, kv_heads, width // heads
        self.q_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim)

    def forward(self, hidden_states, attention_mask=None):
        b, t, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(hidden_states).view(b, t, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(b, t, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        groups = self.num_heads // self.num_key_value_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class Gated(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GPTBlock(nn.Module):
    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads, kv_heads), Gated(width, 3 * width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Two blocks, the output layer tied to the table."""

    def __init__(self, vocab=13, width=16, heads=8, kv_heads=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, kv_heads) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Encoder(nn.Module):
    """torch's own encoder, with padding."""

    def __init__(self, width=8):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 12, dropout=0.0, batch_first=True)
        self.embed, self.encoder = nn.Embedding(9, width), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, 4)

    def forward(self, ids):
        there = (ids != 0).unsqueeze(-1)
        x = self.encoder(self.embed(ids), src_key_padding_mask=ids == 0)
        return self.head((x * there).sum(1) / there.sum(1))


class TwoInputs(nn.Module):
    """Attention from one input to the other, through torch's decoder layer (batch second)."""

    def __init__(self, width=8):
        super().__init__()
        self.a, self.b = nn.Linear(3, width), nn.Linear(5, width)
        self.decode = nn.TransformerDecoderLayer(width, 4, 10, dropout=0.0)
        self.head = nn.Sequential(nn.Linear(width, 7), nn.GELU(), nn.Dropout(0.0), nn.Linear(7, 4))

    def forward(self, x, z):
        mixed = self.decode(self.a(x).transpose(0, 1), self.b(z).transpose(0, 1))
        return self.head(mixed.mean(0))


class ResBlock(nn.Module):
    """ResNet's basic block: convolutions by channels between two points where all channels are needed."""

    def __init__(self, channels, hidden):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, hidden, 3, padding=1, bias=False), nn.BatchNorm2d(hidden)
        self.conv2, self.bn2 = nn.Conv2d(hidden, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x):
        return x + self.bn2(self.conv2(torch.tanh(self.bn1(self.conv1(x)))))


class ResNet(nn.Module):
    """Skips around blocks that are split, and one (CNN's) that cannot be."""

    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(1, 4, 3, padding=1), nn.Sequential(ResBlock(4, 6), ResBlock(4, 5))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


PLANS = {"gpt": "embed:vocab+head:column", "cnn": "head:row", "resnet": "head:row", "encoder": "embed:vocab"}
"""Layers that are too small to be split by themselves, split all the same."""

KINDS = ("mlp", "gpt", "encoder", "two", "cnn", "resnet")
STAGED = ("gpt", "two", "mlp")
"""Cut into stages as well."""
PARTED = ("gpt", "resnet")
"""Replicas keep parts of the pieces: attention and tied tables, channels and running statistics."""


def cells(mesh):
    """Both optimizers where two workers share layers; elsewhere the harder one."""
    if "pipeline" in mesh:
        return [(kind, "adamw") for kind in STAGED]
    return [
        (kind, optimizer)
        for kind in KINDS
        for optimizer in (("sgd", "adamw") if mesh == "tensor=2" else ("adamw",))
    ]


def make(kind):
    """(model, dataset), the same every time; a sample is (inputs, target)."""
    torch.manual_seed(3)
    g = torch.Generator().manual_seed(1)
    y = torch.randint(0, 4, (SAMPLES,), generator=g)
    if kind == "gpt":
        words = torch.randint(0, 13, (SAMPLES, 7), generator=g)
        return GPT().to(D), TensorDataset(words[:, :-1], words[:, 1:])
    if kind == "encoder":
        words = torch.randint(1, 9, (SAMPLES, 6), generator=g)
        words[::3, 4:] = 0
        return Encoder().to(D), TensorDataset(words, y)
    if kind == "two":
        a, b = (
            torch.randn(SAMPLES, 4, 3, generator=g, dtype=D),
            torch.randn(SAMPLES, 6, 5, generator=g, dtype=D),
        )
        return TwoInputs().to(D), TensorDataset(a, b, y)
    made = {"mlp": MLP, "cnn": CNN, "resnet": ResNet}[kind]().to(D)
    return made, zoo.make("cnn" if kind == "resnet" else kind)[1]


def inputs(batch):
    *x, y = batch
    return tuple(x), y


def loader_for(dataset):
    return DataLoader(dataset, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))


def optimizer_for(name, model):
    """(optimizer, norm to clip to or None). Where a true gradient is 0 (a key's bias), a small eps would amplify rounding."""
    params = [p for p in model.parameters() if p.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01), None
    return torch.optim.AdamW(params, lr=0.02, eps=1e-5), 0.5


def plain_torch(kind, optimizer):
    """One process, no Echelon: (weights, outputs of the whole data set in eval mode)."""
    model, dataset = make(kind)
    opt, clip = optimizer_for(optimizer, model)
    loader = loader_for(dataset)
    for _ in range(EPOCHS):
        for batch in loader:
            x, y = inputs(batch)
            zoo.mean_ce(model(*x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad()
    return {k: v.clone() for k, v in model.state_dict().items()}, outputs(model, dataset)


@torch.no_grad()
def outputs(model, dataset):
    model.eval()
    return model(*inputs(dataset.tensors)[0])
