"""nn.MultiheadAttention with its heads dealt to several workers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.parallel.tensor import meet
from echelon.parallel.tensor.layers import Layer
from echelon.parallel.tensor.pieces import dealt


class Heads(Layer):
    """Queries, keys and values of some heads here; the last projection by rows. What comes in and goes out is whole."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch's own: see there."""
        module, batched = self.module, query.dim() == 3
        first, last = dealt(self.way.units, self.axis.size, self.axis.rank)
        # in: batch first
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not module.batch_first:
            key_is, value_is = key is query, value is key
            query = query.transpose(0, 1)
            key = query if key_is else key.transpose(0, 1)
            value = key if value_is else value.transpose(0, 1)
        q, k, v = self._projected(query, key, value)
        q, k, v = (x.unflatten(-1, (last - first, module.head_dim)).transpose(1, 2) for x in (q, k, v))
        # attend
        mask = _merged(attn_mask, key_padding_mask, q, k, (first, last), self.way.units)
        dropout = module.dropout if module.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = (q * (module.head_dim**-0.5)) @ k.transpose(-2, -1)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, dropout) if dropout else weights
            y = weights @ v
        else:
            causal = is_causal and key_padding_mask is None
            y = F.scaled_dot_product_attention(q, k, v, None if causal else mask, dropout, is_causal=causal)
        self.region.leave(query)
        # out
        y = F.linear(y.transpose(1, 2).flatten(2), module.out_proj.weight)
        y = meet.add(y, self.axis)
        if module.out_proj.bias is not None:
            y = y + module.out_proj.bias.to(y.dtype)
        y = y.squeeze(0) if not batched else y if module.batch_first else y.transpose(0, 1)
        if weights is not None:
            weights = meet.gather(weights, self.axis, 1, self.way.units)
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        return y, weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        module, training = self.module, self.module.training
        if module._qkv_same_embed_dim:
            weights = module.in_proj_weight.chunk(3)
        else:
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        if key is query and value is query and module._qkv_same_embed_dim:
            x = self.region.enter(query, training)
            return F.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)  # type: ignore[return-value]
        q, k, v = (
            F.linear(self.region.enter(x, training), w, b)
            for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )
        return q, k, v

    def cuts(self) -> dict[str, tuple[int, int]]:
        found = {
            "in_proj_weight": (0, 3),
            "in_proj_bias": (0, 3),
            "q_proj_weight": (0, 1),
            "k_proj_weight": (0, 1),
        }
        found |= {"v_proj_weight": (0, 1), "out_proj.weight": (1, 1)}
        return {k: v for k, v in found.items() if "." in k or getattr(self.module, k) is not None}


def _merged(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    q: Tensor,
    k: Tensor,
    mine: tuple[int, int],
    heads: int,
) -> Tensor | None:
    """One mask to be added, of (batch or 1, these heads or 1, queries, keys)."""
    batch = q.shape[0]
    mask = None
    if attn_mask is not None:
        mask = _added(attn_mask, q.dtype)
        if mask.dim() == 3:
            if mask.shape[0] == batch * heads:
                mask = mask.unflatten(0, (batch, heads))[:, mine[0] : mine[1]]
            else:
                mask = mask.unsqueeze(1)
        else:
            mask = mask[None, None]
    if key_padding_mask is not None:
        padded = _added(key_padding_mask, q.dtype).reshape(batch, 1, 1, k.shape[2])
        mask = padded if mask is None else mask + padded
    return mask


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))
    return mask.to(dtype)
