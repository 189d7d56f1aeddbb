"""Optimizer steps over flat ranges: through the core, or in plain torch where it was not built. The same bits either way.

Tensors are flat, contiguous, on the CPU, all float32 or all float64. An array is given as (before, after): one tensor twice, to change it in
place, or two, so that the version before the step stays. The core works on one thread, without Python's lock.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from echelon import native
from echelon.errors import UsageError
from echelon.native import reference_update as reference

Versions = tuple[Tensor, Tensor]
"""An array before and after the step."""

DTYPES = {torch.float32: 0, torch.float64: 1}
"""The types that optimizers know, with the core's numbers for them."""


def step(
    kind: str,
    param: Versions,
    grad: Tensor,
    arrays: Mapping[str, Versions | None],
    numbers: Mapping[str, float],
) -> None:
    """One step of "sgd", "adagrad", "rmsprop" or "adam", whose arrays and numbers are named in reference_update.py."""
    check(*param, grad, *(x for pair in arrays.values() if pair is not None for x in pair))
    step_checked(kind, param, grad, arrays, numbers)


def step_checked(
    kind: str,
    param: Versions,
    grad: Tensor,
    arrays: Mapping[str, Versions | None],
    numbers: Mapping[str, float],
) -> None:
    """step() of tensors that went through check(): of others it would read and write anywhere."""
    core = native.core()
    if core is not None:
        getattr(core, kind)(
            _pointers(param), grad.data_ptr(), grad.numel(), DTYPES[grad.dtype],
            **{name: _pointers(pair) for name, pair in arrays.items()}, **numbers,
        )  # fmt: skip
        return
    after = {name: None if pair is None else _carried(pair) for name, pair in arrays.items()}
    getattr(reference, kind)(_carried(param), grad, **after, **numbers)


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
    return float(core.sum_of_squares(x.data_ptr(), x.numel(), DTYPES[x.dtype]))


def finite(x: Tensor) -> bool:
    """Neither NaN nor infinity in it."""
    check(x)
    core = native.core()
    return (
        reference.finite(x) if core is None else bool(core.finite(x.data_ptr(), x.numel(), DTYPES[x.dtype]))
    )


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
