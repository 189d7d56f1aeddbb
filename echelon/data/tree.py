"""Batches as they come: tensors inside dicts, lists, tuples, namedtuples, dataclasses, to any depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def map_tree(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same structure with fn applied to every tensor; what is not understood stays as it is."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, Mapping):
        items = {key: map_tree(fn, value) for key, value in tree.items()}
        try:
            return type(tree)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tree(fn, value) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tree(fn, value) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: map_tree(fn, getattr(tree, f.name)) for f in dataclasses.fields(tree) if f.init}
        return dataclasses.replace(tree, **fields)
    return tree


def tensors(tree: Any) -> list[Tensor]:
    """Every tensor of the tree, in order."""
    found: list[Tensor] = []
    map_tree(found.append, tree)
    return found


def to_device(tree: Any, device: torch.device) -> Any:
    """The tree with its tensors on `device`; objects with a `.to` of their own are moved through it."""
    if (
        not isinstance(tree, (Tensor, Mapping, list, tuple))
        and hasattr(tree, "to")
        and not dataclasses.is_dataclass(tree)
    ):
        return tree.to(device)
    return map_tree(lambda t: t.to(device, non_blocking=True), tree)


def length(tree: Any) -> int | None:
    """The number of samples of a ready-made batch: the dim 0 that all its tensors share, or None."""
    sizes = {t.shape[0] if t.dim() else None for t in tensors(tree)}
    return sizes.pop() if len(sizes) == 1 else None


def cut_tree(tree: Any, lo: int, hi: int, n: int) -> Any:
    """Samples [lo, hi) of a ready-made batch of n: tensors along dim 0, and plain lists of n entries beside them."""
    if (
        isinstance(tree, list)
        and len(tree) == n
        and not any(isinstance(item, (Tensor, Mapping)) for item in tree)
    ):
        return tree[lo:hi]
    if isinstance(tree, Mapping):
        return {key: cut_tree(value, lo, hi, n) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(cut_tree(value, lo, hi, n) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(cut_tree(value, lo, hi, n) for value in tree)
    return map_tree(lambda t: t[lo:hi], tree)
