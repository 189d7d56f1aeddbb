"""A tensor of which each worker has a stretch of one dimension, and which is whole to whoever looks at it.

It is what an output layer gives whose features are dealt: the logits of a vocabulary. A cross-entropy is computed from the stretches
(crossentropy.py); views, slices, casts and the like are done to the stretch (follow.py); whatever else reads it gets the gathered tensor, so
the answer is right whatever the script does. It has the shape and type of the whole, and gradients of it are dealt alike or whole.

All workers that share the layer must read it, or none: to gather is to meet. A write in place makes the tensor whole for good; another
tensor that shares its memory and is dealt still cannot follow that, and says so when it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from echelon import activity
from echelon.errors import StrategyError
from echelon.parallel.tensor import crossentropy
from echelon.parallel.tensor.follow import ELEMENTWISE, follow
from echelon.parallel.tensor.meet import Axis


@dataclass
class Uses:
    """What became of a layer's outputs so far."""

    name: str = ""
    losses: int = 0
    """Cross-entropies of the stretches."""
    gathers: int = 0

    def read(self) -> bool:
        """Gathered, and never for nothing but a loss."""
        return self.gathers > 0 and self.losses == 0

    @property
    def pays(self) -> bool:
        """A layer whose first outputs were gathered, and none was for a loss, is no output layer."""
        return self.losses > 0 or self.gathers < 2


@dataclass(frozen=True)
class Lies:
    """How a tensor is dealt."""

    axis: Axis
    dim: int
    units: int
    uses: Uses
    number: int
    """Of the output that it comes from."""


READING = "an output that is split over workers: all that share the layer must read it"

OUTSIDE = {
    "numpy",
    "tolist",
    "__array__",
    "__dlpack__",
    "data_ptr",
    "storage",
    "untyped_storage",
    "__reduce_ex__",
    "__repr__",
    "__format__",
}
"""What looks at memory, and not through operations of torch."""


class DealtTensor(Tensor):
    """See above."""

    piece: Tensor | None
    """None once it was made whole for good."""
    lies: Lies

    @staticmethod
    def __new__(cls, shape: Tensor, piece: Tensor, lies: Lies) -> DealtTensor:
        """`shape`: a tensor of the whole's sizes and strides, without memory."""
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape.shape, shape.stride(), dtype=piece.dtype, device=piece.device
        )
        made.piece, made.lies, made._whole = piece, lies, None
        return made  # type: ignore[no-any-return]

    def __init__(self, shape: Tensor, piece: Tensor, lies: Lies) -> None:
        self._whole: Tensor | None

    def stretch(self) -> Tensor | None:
        """This worker's stretch, or None where there is none any more. StrategyError where it may be old."""
        if self.piece is None:
            return None
        if not self.is_inference() and self._version:  # shared by all that share its memory
            name = self.lies.uses.name
            raise StrategyError(
                f"the output of `{name}` is split over workers, and was written in place through another view of it",
                remedy=f"Write without `_` (masked_fill, torch.where), or have it gathered at once: --set tensor_plan={name}:gather.",
            )
        return self.piece

    def whole(self) -> Tensor:
        """Gathered, once."""
        piece = self.stretch()
        if self._whole is None:
            assert piece is not None
            lies = self.lies
            lies.uses.gathers += 1
            with activity.inside(READING):
                self._whole = lies.axis.read(piece.detach(), lies.dim, lies.units, lies.number)
        return self._whole

    def settle(self) -> Tensor:
        """Whole for good: what is written into it, or into a view of it, counts."""
        whole = self.whole()
        self.piece = None
        return whole

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.whole())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            found = _loss(*args, **kwargs)
            if found is not None:
                return found
        elif getattr(func, "__name__", "") in OUTSIDE and isinstance(args[0], DealtTensor):
            args = (args[0].whole(), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        found = _elementwise(func, args, kwargs) if func in ELEMENTWISE else _followed(func, args, kwargs)
        if found is not None:
            return found
        # in place, or a view into the whole: what is written there has to be seen here
        opens: Callable[[DealtTensor], Tensor] = DealtTensor.whole
        written = func._schema.is_mutable
        if written or func.is_view:
            opens = DealtTensor.settle
        plain = pytree.tree_map_only(DealtTensor, opens, (args, kwargs))
        out = func(*plain[0], **plain[1])
        return args[0] if written and isinstance(args[0], DealtTensor) else out


def _followed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DealtTensor | None:
    x = args[0] if args else None
    if not isinstance(x, DealtTensor) or any(
        isinstance(a, Tensor) for a in pytree.tree_leaves((args[1:], kwargs))
    ):
        return None
    piece, lies = x.stretch(), x.lies
    if piece is None or kwargs.get("device", piece.device) != piece.device:
        return None
    found = follow(func, x.shape, lies.dim, piece.shape[lies.dim], args[1:])
    if found is None:
        return None
    behind, dim = found
    shape = func(
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), *args[1:], **_meta(kwargs)
    )
    mine = piece.reshape(*behind) if func in _RESHAPES else func(piece, *behind, **kwargs)
    return DealtTensor(shape, mine, replace(lies, dim=dim))


_RESHAPES = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


def _meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory", "layout")}


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DealtTensor | None:
    dealt = [a for a in args if isinstance(a, DealtTensor)]
    first = dealt[0]
    others = [a for a in args if isinstance(a, Tensor) and not isinstance(a, DealtTensor)]
    alike = all(
        (d.lies.axis, d.lies.dim, d.lies.units, d.shape)
        == (first.lies.axis, first.lies.dim, first.lies.units, first.shape)
        and d.stretch() is not None
        for d in dealt
    )
    if not alike or any(other.dim() for other in others):
        return None
    mine = func(*(a.stretch() if isinstance(a, DealtTensor) else a for a in args), **kwargs)
    shape = torch.empty_strided(first.shape, first.stride(), dtype=mine.dtype, device="meta")
    return DealtTensor(shape, mine, first.lies)


class _Deal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, lies: Lies) -> Tensor:
        ctx.lies = lies
        return dealt_as(piece.view_as(piece), lies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Stretch.apply(grads[0], ctx.lies), None


class _Stretch(torch.autograd.Function):
    """This worker's stretch of a tensor that is dealt, or whole on every worker."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lies: Lies) -> Tensor:
        ctx.lies = lies
        piece = x.stretch() if isinstance(x, DealtTensor) and x.lies.dim == lies.dim else None
        if piece is not None:
            return piece.view_as(piece)
        return lies.axis.stretch(x.whole() if isinstance(x, DealtTensor) else x, lies.dim, lies.units)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Deal.apply(grads[0], ctx.lies), None


def dealt_as(piece: Tensor, lies: Lies) -> DealtTensor:
    first, last = lies.axis.mine(lies.units)
    sizes = list(piece.shape)
    sizes[lies.dim] = sizes[lies.dim] // (last - first) * lies.units
    return DealtTensor(torch.empty(sizes, dtype=piece.dtype, device="meta"), piece, lies)


def deal(piece: Tensor, axis: Axis, units: int, uses: Uses) -> Tensor:
    """The tensor of whose last dimension this worker has `piece`."""
    axis.outputs += 1
    axis.look_again(piece, uses.read)
    return _Deal.apply(piece, Lies(axis, piece.dim() - 1, units, uses, axis.outputs))  # type: ignore[no-any-return]


def _loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """torch's cross_entropy of logits that are dealt by classes; None where they must be gathered for it."""
    if (
        not isinstance(input, DealtTensor)
        or isinstance(target, DealtTensor)
        or isinstance(weight, DealtTensor)
    ):
        return None
    lies, at = input.lies, 1 if input.dim() > 1 else 0
    classes = (*input.shape[:at], *input.shape[at + 1 :])
    indices = not target.is_floating_point() and tuple(target.shape) == tuple(classes)
    plain = size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    weighs = weight is None or (not weight.requires_grad and tuple(weight.shape) == (input.shape[at],))
    if lies.dim != at or not indices or not plain or not weighs or input.stretch() is None:
        return None
    lies.uses.losses += 1
    piece: Tensor = _Stretch.apply(input, lies)  # type: ignore[assignment]
    rows = piece.movedim(at, -1)
    asked = crossentropy.Asked(lies.axis, lies.units, ignore_index, label_smoothing, reduction)
    return crossentropy.cross_entropy(rows, target, weight, asked)
