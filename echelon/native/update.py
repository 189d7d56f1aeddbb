"""Optimizer steps over flat ranges: through the core, or in plain torch where it was not built. The same bits either way.

Tensors are flat, contiguous, on the CPU, all float32 or all float64. An array is given as (before, after): one tensor twice, to change it in
place, or two, so that the version before the step stays. A gradient may be given in parts: their sum, in this order. The core
shares long ranges among threads (threads.py), without Python's lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from echelon import native
from echelon.errors import UsageError
from echelon.native import reference_update as reference
from echelon.native import spread, threads

Versions = tuple[Tensor, Tensor]
"""An array before and after the step."""

Copies = Sequence[tuple[Tensor, int]]
"""Where the values after a step go as well: bytes, and the place in them."""

DTYPES = {torch.float32: 0, torch.float64: 1}
"""The types that optimizers know, with the core's numbers for them."""


def step(
    kind: str,
    param: Versions,
    grad: Tensor | Sequence[Tensor],
    arrays: Mapping[str, Versions | None],
    numbers: Mapping[str, float],
) -> None:
    """One step of "sgd", "adagrad", "rmsprop" or "adam", whose arrays and numbers are named in reference_update.py."""
    parts = [grad] if isinstance(grad, Tensor) else grad
    check(*param, *parts, *(x for pair in arrays.values() if pair is not None for x in pair))
    step_checked(kind, param, parts, arrays, numbers)


def step_checked(
    kind: str,
    param: Versions,
    parts: Sequence[Tensor],
    arrays: Mapping[str, Versions | None],
    numbers: Mapping[str, float],
    copies: Copies = (),
) -> None:
    """step() of tensors that went through check(), with room in `copies`: of others it would read and write anywhere."""
    core, after = native.core(), param[1]
    if core is not None:
        getattr(core, kind)(
            _pointers(param), [x.data_ptr() for x in parts], after.numel(), DTYPES[after.dtype],
            **{name: _pointers(pair) for name, pair in arrays.items()}, **numbers,
            copies=[x.data_ptr() + at for x, at in copies], threads=threads.number(),
            large=any(x.nbytes >= spread.LARGE_BYTES for x, _ in copies),
        )  # fmt: skip
        return
    grad = parts[0]
    if len(parts) > 1:
        spread.add([grad := torch.empty_like(after)], parts)
    state = {name: None if pair is None else _carried(pair) for name, pair in arrays.items()}
    getattr(reference, kind)(_carried(param), grad, **state, **numbers)
    for x, at in copies:
        x.view(torch.uint8)[at : at + after.nbytes].copy_(after.view(torch.uint8))


def average(average: Versions, x: Tensor, weight: float) -> None:
    """after = before + weight * (x - before): an EMA whose decay is 1 - weight."""
    check(x, *average)
    core = native.core()
    if core is not None:
        core.average(_pointers(average), x.data_ptr(), x.numel(), DTYPES[x.dtype], weight)
    else:
        reference.average(_carried(average), x, weight)


def sum_of_squares(x: Tensor) -> float:
    """In float64 and in a fixed order: the same bits everywhere. It does depend on how a tensor is cut into ranges."""
    check(x)
    core = native.core()
    if core is None:
        return reference.sum_of_squares(x)
    return float(core.sum_of_squares(x.data_ptr(), x.numel(), DTYPES[x.dtype], threads.number()))


def finite(x: Tensor) -> bool:
    """Neither NaN nor infinity in it."""
    check(x)
    core = native.core()
    if core is None:
        return reference.finite(x)
    return bool(core.finite(x.data_ptr(), x.numel(), DTYPES[x.dtype], threads.number()))


def check(*tensors: Tensor) -> None:
    """Raises UsageError unless these are flat, contiguous, on the CPU, equally long and of one type that optimizers know."""
    first = tensors[0]
    for x in tensors:
        if x.dtype not in DTYPES or x.device.type != "cpu" or x.dim() != 1 or not x.is_contiguous():
            raise UsageError(
                f"a range must be a flat, contiguous float32 or float64 tensor on the CPU, not {_told(x)}",
                remedy="x.detach().reshape(-1) of a contiguous tensor is one.",
            )
        if x.dtype is not first.dtype or x.numel() != first.numel():
            raise UsageError(
                f"a range, its gradient and its state must be alike: {_told(first)} met {_told(x)}",
                remedy="Each needs the type and the number of elements of the parameter's range.",
            )


def check_one(x: Tensor, like: Tensor) -> None:
    """check() of one more tensor, where `like` went through it."""
    if (
        x.dtype is not like.dtype
        or x.numel() != like.numel()
        or x.dim() != 1
        or x.device.type != "cpu"
        or not x.is_contiguous()
    ):
        check(like, x)


def _carried(pair: Versions) -> Tensor:
    """The twins work in place: on the version after the step."""
    before, after = pair
    return after if before.data_ptr() == after.data_ptr() else after.copy_(before)


def _pointers(pair: Versions | None) -> tuple[int, int]:
    return (0, 0) if pair is None else (pair[0].data_ptr(), pair[1].data_ptr())


def _told(x: Tensor) -> str:
    kind = str(x.dtype).removeprefix("torch.")
    return f"{kind} of shape {list(x.shape)}{'' if x.is_contiguous() else ', strided'} on {x.device}"
