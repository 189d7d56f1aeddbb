"""Names under which layers that belong together are found in scripts and libraries. They suggest; proof.py decides."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

Pattern = tuple[tuple[str, ...], tuple[str, ...]]

OUT = (
    "o_proj",
    "out_proj",
    "c_proj",
    "wo",
    "to_out",
    "o",
    "out_lin",
    "proj",
    "mix",
    "dense",
    "out",
    "output",
)
"""The layer behind attention."""

ATTENTION: tuple[Pattern, ...] = tuple(
    (first, OUT)
    for first in (
        ("q_proj", "k_proj", "v_proj"),
        ("query", "key", "value"),
        ("wq", "wk", "wv"),
        ("to_q", "to_k", "to_v"),
        ("q_lin", "k_lin", "v_lin"),
        ("q", "k", "v"),
        ("c_attn",),
        ("qkv",),
        ("qkv_proj",),
        ("query_key_value",),
        ("Wqkv",),
        ("in_proj",),
        ("to_qkv",),
    )
)
"""(layers in front, one of the layers behind): queries, keys and values apart, or packed into one."""

ATTENTION += (
    (("self.query", "self.key", "self.value"), ("output.dense",)),
    (("attention.query", "attention.key", "attention.value"), ("output.dense",)),
)
"""… in modules of their own, as BERT has them."""

MLP: tuple[Pattern, ...] = (
    (("gate_proj", "up_proj"), ("down_proj",)),
    (("w1", "w3"), ("w2",)),
    (("wi_0", "wi_1"), ("wo",)),
    (("gate", "up"), ("down",)),
    (("fc1",), ("fc2",)),
    (("c_fc",), ("c_proj",)),
    (("linear1",), ("linear2",)),
    (("lin1",), ("lin2",)),
    (("l1",), ("l2",)),
    (("up",), ("down",)),
    (("up_proj",), ("down_proj",)),
    (("gate_up_proj",), ("down_proj",)),
    (("w1",), ("w2",)),
    (("w12",), ("w3",)),
    (("wi",), ("wo",)),
    (("dense_h_to_4h",), ("dense_4h_to_h",)),
    (("hidden",), ("out",)),
    (("fc_in",), ("fc_out",)),
    (("intermediate.dense",), ("output.dense",)),
)

HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead", "heads", "num_q_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_head", "n_kv_heads", "kv_heads")
HEAD_SIZES = ("head_dim", "head_size", "attention_head_size")
"""Where code counts heads from its tensors, this says how many there are."""
WIDTHS = (
    "embed_dim",
    "hidden_size",
    "all_head_size",
    "split_size",
    "n_embd",
    "inner_dim",
    "d_model",
    "width",
    "dim",
)
"""Sizes that code uses for the joined heads of a worker; taken if they are the width in front of the last layer."""


@dataclass(frozen=True)
class Hit:
    """The layers that a pattern found."""

    first: tuple[str, ...]
    last: str

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.first, self.last)


def match(pattern: Pattern, there: Container[str]) -> Hit | None:
    """The pattern's layers, if all in front and one of those behind are there."""
    first, behind = pattern
    if not all(name in there for name in first):
        return None
    last = next((name for name in behind if name in there and name not in first), None)
    return Hit(first, last) if last is not None else None
