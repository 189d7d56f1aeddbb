"""Self-checks that are always on, at step 1: does the loss of a part mean what the same-answer promise needs?

A plain loop's `loss.backward()` is watched during the first step. From the loss's graph we read what it divides by (the
number of valid targets of a cross-entropy, the divisor of a division, the elements of a mean) and compare each rank's
divisor with its share of the samples: where they are not in proportion, parts count for more or less than they should.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TOLERANCE = 1e-3
MEAN, SUM = 1, 2
ELEMENTWISE = (
    "MseLossBackward0",
    "SmoothL1LossBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
    "HuberLossBackward0",
)


@dataclass(frozen=True)
class Divisor:
    """What a loss divides its sum by on this rank."""

    value: float
    what: str
    is_sum: bool = False
    """A sum with no division that depends on the part: the declared loss should be `sum`."""


def divisor_of(loss: Tensor) -> Divisor | None:
    """Reads the divisor off the graph behind `loss`; None when the graph does not tell."""
    node: Any = loss.grad_fn
    value, what = 1.0, ""
    for _ in range(64):
        if node is None:
            return None
        name = type(node).__name__
        reduction = getattr(node, "_saved_reduction", 0)
        if hasattr(node, "told_divisor"):  # a cross-entropy of logits that lie on several workers
            by, how = node.told_divisor
            if how == "mean":
                return Divisor(value * float(by), what or "cross_entropy: the targets that are not ignored")
            return Divisor(value, what or "a sum", is_sum=value == 1.0) if how == "sum" else None
        if name.startswith("NllLoss") and reduction == MEAN:
            valid = float(node._saved_total_weight)
            return Divisor(value * valid, what or "cross_entropy: the targets that are not ignored")
        if name == "MeanBackward0":
            return Divisor(value * _numel(node), what or "mean: its elements")
        if name in ELEMENTWISE and reduction == MEAN:
            return Divisor(value * float(node._saved_self.numel()), what or "mean: its elements")
        if name.startswith("NllLoss") or name in ELEMENTWISE:
            return Divisor(value, what or "a sum", is_sum=value == 1.0) if reduction == SUM else None
        if name == "SumBackward0":
            return Divisor(value, what or "a sum", is_sum=value == 1.0)
        if name == "DivBackward0":
            by = node._saved_other
            if by is not None and (not isinstance(by, Tensor) or by.numel() == 1):
                value, what = value * float(by), "the division by a count"
        elif name not in (
            "MulBackward0",
            "NegBackward0",
            "ToCopyBackward0",
            "ViewBackward0",
            "SqueezeBackward0",
            "CloneBackward0",
        ):
            return None
        following = [
            fn for fn, _ in node.next_functions if fn is not None and type(fn).__name__ != "AccumulateGrad"
        ]
        node = following[0] if len(following) == 1 else None
    return None


def _numel(node: Any) -> float:
    sizes = node._saved_self_sym_sizes
    count = 1.0
    for size in sizes:
        count *= float(size)
    return count


def judge(divisors: list[float], counts: list[float], is_sum: bool) -> tuple[float, str] | None:
    """Pure: the bias factor and its sentence, or None when every part counts as it should.

    Rank r's samples get weight counts[r]/N × 1/divisor[r] each unit of sum; they should all get 1/D with D the total divisor.
    """
    known = [(d, n) for d, n in zip(divisors, counts, strict=True) if n > 0 and d > 0]
    if len(known) < 2:
        return None
    if is_sum:
        return float(len(known)), "it is a sum over the part, and parts are averaged"
    total_d, total_n = sum(d for d, _ in known), sum(n for _, n in known)
    factors = [(n / total_n) / (d / total_d) for d, n in known]
    worst = max(factors, key=lambda f: abs(f - 1.0) if f >= 1 else abs(1.0 / f - 1.0))
    if abs(worst - 1.0) <= TOLERANCE:
        return None
    return worst, "it divides by a count that is not in proportion to the part"


class LossWatch:
    """Looks at the losses of the first step, then takes itself away."""

    def __init__(self, seen: Callable[[Tensor], None]) -> None:
        self.seen = seen
        self.original: Any = None

    @property
    def active(self) -> bool:
        return self.original is not None

    def begin(self) -> None:
        if self.original is not None:
            return
        self.original = original = torch.Tensor.backward
        watch = self

        def backward(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            watch.seen(self)
            return original(self, *args, **kwargs)

        torch.Tensor.backward = backward  # type: ignore[method-assign]

    def end(self) -> None:
        if self.original is not None:
            torch.Tensor.backward = self.original  # type: ignore[method-assign]
            self.original = None


def halves_agree(
    loss_fn: Callable[[Any, Any], Tensor], output: Any, target: Any
) -> tuple[float, float] | None:
    """run.step's check: the loss of a part against the weighted mean of its halves; None when they agree or cannot be cut."""
    if (
        not isinstance(output, Tensor)
        or not isinstance(target, Tensor)
        or output.dim() == 0
        or target.dim() == 0
    ):
        return None
    n = output.shape[0]
    if n < 2 or target.shape[0] != n:
        return None
    half = n // 2
    with torch.no_grad():
        whole = float(loss_fn(output.detach(), target))
        first, second = (
            float(loss_fn(output.detach()[:half], target[:half])),
            float(loss_fn(output.detach()[half:], target[half:])),
        )
    mean = (first * half + second * (n - half)) / n
    return None if abs(whole - mean) <= 1e-4 * max(1e-6, abs(whole), abs(mean)) else (whole, mean)


def biased(factor: float, why: str, what: str) -> str:
    return (
        f"this loss is not a mean over samples: {why}" + (f" ({what})" if what else "") + ".\n"
        f"  Some workers' samples count {factor:.3g}× what they would in one process.\n"
        "  Use run.mean(total, count) for the loss, or declare --set loss=sum if it is a sum on purpose."
    )


def not_a_mean(whole: float, mean: float) -> str:
    return (
        f"run.step: the loss of a part is {whole:.6g}, the weighted mean of its two halves {mean:.6g}: it is not a mean over samples.\n"
        "  Cut over workers it gives another answer than one process.\n"
        "  Use run.mean for unequal counts, run.gather for losses over pairs of samples, or declare --set loss=sum."
    )
