"""Models that tests cut into stages, each with inputs, a target and a loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Case:
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    loss_fn: Callable[[Any, Any], Tensor]


class Residual(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int = 1) -> None:
        super().__init__()
        self.a = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.na = nn.BatchNorm2d(cout)
        self.b = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.nb = nn.BatchNorm2d(cout)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(cin, cout, 1, stride) if stride > 1 or cin != cout else None

    def forward(self, x: Tensor) -> Tensor:
        same = x if self.down is None else self.down(x)
        y = self.act(self.na(self.a(x)))
        y = self.nb(self.b(y))
        y += same
        return self.act(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(Residual(8, 8), Residual(8, 8))
        self.layer2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).split(d, dim=2)
        q, k, v = (y.view(b, t, self.heads, d // self.heads).transpose(1, 2) for y in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        scores = scores.masked_fill(mask, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        x = x + self.out(y.transpose(1, 2).contiguous().view(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Gpt(nn.Module):
    def __init__(self, vocab: int = 17, dim: int = 16, depth: int = 3, again: bool = False) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.randn(32, dim) * 0.1)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.again = again

    def forward(self, ids: Tensor) -> Tensor:
        t = ids.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool, device=ids.device).triu(1)
        x = self.tok(ids) + self.pos[torch.arange(t, device=ids.device)]
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False) if self.again else block(x, mask)
        return F.linear(self.norm(x), self.tok.weight)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, 11)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            ids.shape[1], device=ids.device, dtype=torch.float64
        )
        return self.head(self.encoder(self.tok(ids), mask=mask))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 12), nn.Tanh())
        self.right = nn.Linear(4, 12)
        self.mix = nn.Linear(24, 12)
        self.out = nn.Linear(12, 3)

    def forward(self, a: Tensor, *, b: Tensor, keep: Tensor, scale: float = 1.0) -> dict[str, Any]:
        x = torch.cat([self.left(a), self.right(b) * scale], dim=1)
        x = torch.relu(self.mix(x)) * keep.to(x.dtype)[:, None]
        return {"logits": self.out(x), "hidden": (x, a)}


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d1, self.d2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.mid = nn.Conv2d(8, 8, 3, padding=1)
        self.u2, self.u1 = nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)
        self.last = nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.d1(x))
        b = F.relu(self.d2(F.max_pool2d(a, 2)))
        c = F.relu(self.mid(F.max_pool2d(b, 2)))
        c = torch.cat([F.interpolate(c, scale_factor=2), b], 1)
        c = F.relu(self.u2(c))
        c = torch.cat([F.interpolate(c, scale_factor=2), a], 1)
        return self.last(torch.cat([F.relu(self.u1(c)), x], 1))


class InPlace(nn.Module):
    """One residual stream that every layer writes into; a slice written through a view; a table filled row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.last = nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x.mul_(2)
        h = self.first(x)
        for layer in self.layers:
            old, h = h, layer(h)
            h += old
            h *= 0.7
            h.add_(0.1)
        part = h[:, :3] * 1
        part[:, 0].mul_(0.5)
        rows = torch.zeros(len(x), 2, 6, dtype=h.dtype)
        rows[:, 0] = h
        rows[:, 1].copy_(h.sin())
        self.seen.add_(1)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        h = h + F.pad(part, (0, 3)) + rows.sum(1)
        h.mul_(2).relu_()
        return self.last(h)


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
        self.teacher = nn.Linear(8, 8)
        self.neck = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)
        self.unused = nn.Linear(3, 3)
        for p in self.body[0].parameters():
            p.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        with torch.no_grad():
            goal = self.teacher(x)
        y = self.neck(x)
        return self.head(y), F.mse_loss(y, goal)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = Doubled.apply(self.a(x))
        x.register_hook(lambda grad: grad * 5)
        return self.b(Doubled.apply(x))


@dataclass
class Output:
    logits: Tensor
    states: list[Tensor]
    loss: Tensor | None = None


class RmsNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Rotary(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("speed", 1.0 / 100 ** (torch.arange(0, dim, 2) / dim), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.speed[None, :, None].expand(len(positions), -1, 1) @ positions[:, None, :].to(x.dtype)
        angles = torch.cat([angles, angles], dim=1).transpose(1, 2)
        return angles.cos(), angles.sin()


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size, self.heads, self.groups = dim // heads, heads, groups
        self.q_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(dim, groups * self.size, bias=False) for _ in range(2))

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        shape = (*x.shape[:-1], -1, self.size)
        q, k, v = (p(x).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (y * turn[0][:, None] + self.half(y) * turn[1][:, None] for y in (q, k))
        k, v = (y.repeat_interleave(self.heads // self.groups, dim=1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1).contiguous()), None

    @staticmethod
    def half(x: Tensor) -> Tensor:
        a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-b, a), dim=-1)


class Decoder(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(dim, 4, 2), RmsNorm(dim), RmsNorm(dim)
        self.gate, self.up, self.down = nn.Linear(dim, 24), nn.Linear(dim, 24), nn.Linear(24, dim)

    def forward(self, hidden: Tensor, *, turn: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        residual = hidden
        hidden, _ = self.attention(x=self.norm1(hidden), turn=turn, mask=mask)
        hidden = residual + hidden
        x = self.norm2(hidden)
        return hidden + self.down(F.silu(self.gate(x)) * self.up(x))


class Llama(nn.Module):
    """In the style of Hugging Face: rotary positions, grouped heads, keyword arguments, a dataclass as output, padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rotary = nn.Embedding(13, 16), Rotary(4)
        self.layers = nn.ModuleList(Decoder(16) for _ in range(3))
        self.norm, self.lm_head = RmsNorm(16), nn.Linear(16, 13, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Output:
        x = self.embed(input_ids)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        turn = self.rotary(x, positions)
        mask = None
        if attention_mask is not None:
            t = x.shape[1]
            mask = (
                torch.full((t, t), torch.finfo(x.dtype).min, dtype=x.dtype)
                .triu(1)[None, None]
                .repeat(len(x), 1, 1, 1)
            )
            mask[:, :, :, :t] = mask[:, :, :, :t].masked_fill(attention_mask[:, None, None, :] == 0, -1e9)
        states = [x]
        for layer in self.layers:
            x = layer(x, turn=turn, mask=mask)
            states.append(x)
        logits = self.lm_head(self.norm(x))
        loss = None if labels is None else next_token(logits, labels)
        return Output(logits, states, loss)


class Tied(nn.Module):
    """The output layer is a module that has the embedding's weight; a layer is called twice; an LSTM; dropout that is off."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.twice = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        x, (last, _) = self.lstm(self.tok(ids))
        x = self.twice(x + last.transpose(0, 1))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        x = self.twice(F.dropout(x, 0.0, self.training).mT.mT)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x)


class Translate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(11, 16)
        self.body = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True)
        self.cross = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, ids: Tensor, pad: Tensor | None = None) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
        x = self.body(self.tok(ids), self.tok(ids.flip(1)), tgt_mask=mask)
        y, _ = self.cross(x, x, x, key_padding_mask=ids == 0 if pad is None else pad)
        return y @ self.tok.weight.t()


def mlp(width: int = 12, depth: int = 4) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(6, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def next_token(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def cases() -> dict[str, Callable[[], Case]]:
    def vector(model: nn.Module, width: int, classes: int) -> Case:
        return Case(
            model.double(),
            (torch.randn(8, width, dtype=torch.float64),),
            {},
            torch.randint(classes, (8,)),
            F.cross_entropy,
        )

    def image(model: nn.Module, channels: int) -> Tensor:
        return torch.randn(4, channels, 8, 8, dtype=torch.float64)

    def text(model: nn.Module, vocab: int, length: int = 9) -> Case:
        return Case(
            model.double(),
            (torch.randint(vocab, (3, length)),),
            {},
            torch.randint(vocab, (3, length)),
            next_token,
        )

    def two() -> Case:
        kwargs = {"b": torch.randn(8, 4).double(), "keep": torch.rand(8) > 0.3, "scale": 0.5}

        def loss(out: Any, y: Tensor) -> Tensor:
            first, second = out["hidden"]
            return F.cross_entropy(out["logits"], y) + first.square().mean() + second.mean()

        return Case(TwoInputs().double(), (torch.randn(8, 6).double(),), kwargs, torch.randint(3, (8,)), loss)

    def unet() -> Case:
        model = UNet().double()
        x = image(model, 1)
        return Case(model, (x,), {}, torch.randn_like(x), F.mse_loss)

    def resnet() -> Case:
        model = ResNet().double()
        return Case(model, (image(model, 3),), {}, torch.randint(5, (4,)), F.cross_entropy)

    def frozen() -> Case:
        case = vector(PartlyFrozen(), 4, 2)
        case.loss_fn = lambda out, y: F.cross_entropy(out[0], y) + out[1]
        return case

    def llama() -> Case:
        ids = torch.randint(13, (3, 7))
        pad = torch.ones(3, 7, dtype=torch.long)
        pad[0, 5:] = 0

        def loss(out: Output, y: Tensor) -> Tensor:
            assert out.loss is not None
            return out.loss + out.states[1].square().mean()

        return Case(Llama().double(), (ids,), {"attention_mask": pad, "labels": ids}, ids, loss)

    return {
        "llama": llama,
        "mlp": lambda: vector(mlp(), 6, 3),
        "resnet": resnet,
        "gpt": lambda: text(Gpt(), 17),
        "gpt computed again": lambda: text(Gpt(again=True), 17),
        "encoder": lambda: text(Encoder(), 11),
        "two inputs": two,
        "unet": unet,
        "in place": lambda: vector(InPlace(), 4, 2),
        "partly frozen": frozen,
        "tied": lambda: text(Tied(), 11),
        "translate": lambda: text(Translate(), 11),
        "own function": lambda: vector(OwnFunction(), 4, 4),
    }
