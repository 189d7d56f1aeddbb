"""Operations that a tensor whose one dimension is dealt over workers goes through as it is: what each does to the piece, and where the
dimension is afterwards. Pure, but for the call itself.

Whatever is not here, or would look across the dealt dimension, is not followed: it gets the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten

SAME = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh.default,
}
"""The dimension stays where it is."""

VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default}

ELEMENTWISE = {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar,
    aten.div.Scalar, aten.neg.default, aten.tanh.default, aten.tanh_backward.default,
}  # fmt: skip
"""Element by element: pieces that lie alike, and single numbers."""


def follow(
    func: Any, shape: Sequence[int], dim: int, here: int, args: tuple[Any, ...]
) -> tuple[tuple[Any, ...], int] | None:
    """(what the operation gets behind the piece, the dealt dimension afterwards); None where it needs the whole.

    The whole has `shape`, of whose dimension `dim` the piece has `here` elements. `args` is what follows the tensor itself."""
    ndim = len(shape)
    if func in SAME or func is aten._to_copy.default:
        return args, dim
    if func in VIEWS:
        return _viewed(shape, dim, here, args)
    if func in (aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.dim):
        at = int(args[0]) if args else 0
        at += (ndim + (func is aten.unsqueeze.default)) * (at < 0)
        return _beside(func, at, dim, args)
    if func in (aten.transpose.int, aten.permute.default, aten.t.default):
        order = _order(func, ndim, args)
        return args, order.index(dim)
    if func in (aten.slice_backward.default, aten.select_backward.default):
        return _grown(func, dim, here, args)
    return None


def _viewed(
    shape: Sequence[int], dim: int, here: int, args: tuple[Any, ...]
) -> tuple[tuple[Any, ...], int] | None:
    sizes = list(args[0])
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = math.prod(shape) // known if known else 0
    before = math.prod(shape[:dim])
    for at, size in enumerate(sizes):
        if size == shape[dim] and math.prod(sizes[:at]) == before and math.prod(sizes) == math.prod(shape):
            return ([*sizes[:at], here, *sizes[at + 1 :]],), at
    return None


def _beside(func: Any, at: int, dim: int, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], int] | None:
    if func is aten.unsqueeze.default:
        return args, dim + (at <= dim)
    if at == dim:
        return None
    return args, dim - (at < dim) * (func in (aten.select.int, aten.squeeze.dim))


def _order(func: Any, ndim: int, args: tuple[Any, ...]) -> list[int]:
    """Which dimension comes to each place."""
    order = list(range(ndim))
    if func is aten.permute.default:
        return [d % ndim for d in args[0]]
    first, second = (0, ndim - 1) if func is aten.t.default else (d % ndim for d in args[:2])
    order[first], order[second] = order[second], order[first]
    return order


def _grown(func: Any, dim: int, here: int, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], int] | None:
    """Zeros around a gradient, along another dimension than the dealt one."""
    sizes = list(args[0])
    at = int(args[1]) % len(sizes)
    dim += (at <= dim) * (func is aten.select_backward.default)
    if at == dim:
        return None
    sizes[dim] = here
    return (sizes, *args[1:]), dim
