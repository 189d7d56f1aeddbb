"""The core's optimizer steps in plain torch, in place: what they must give, bit for bit, and what runs where it was not built.

Each follows the single-tensor code of torch.optim, operation by operation. Two things are not torch's word alone:
`add(alpha=)`, `addcmul` and `lerp` multiply and add in one rounding where torch's vector code does (any x86 processor with AVX2), and
so does the core; `fuses()` tells. And torch's square root (MKL's) is often one bit away from the correctly rounded one, which
numpy and the core give.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

LANES, BLOCK = 16, 4096


def sgd(
    param: Tensor, grad: Tensor, momentum_buffer: Tensor | None, *, scale: float, weight_decay: float,
    lr: float, momentum: float, dampening: float, nesterov: bool, first: bool,
) -> None:  # fmt: skip
    """`first`: the buffer becomes the gradient, whatever it held."""
    g = _gradient(param, grad, scale, weight_decay)
    if momentum != 0:
        assert momentum_buffer is not None
        if first:
            momentum_buffer.copy_(g)
        else:
            momentum_buffer.mul_(momentum).add_(g, alpha=1 - dampening)
        g = g.add(momentum_buffer, alpha=momentum) if nesterov else momentum_buffer
    param.add_(g, alpha=-lr)


def adagrad(
    param: Tensor, grad: Tensor, sum: Tensor, *, scale: float, weight_decay: float, lr: float, eps: float
) -> None:
    """`lr` is that of this step, after its decay."""
    g = _gradient(param, grad, scale, weight_decay)
    sum.addcmul_(g, g, value=1)
    param.addcdiv_(g, root(sum).add_(eps), value=-lr)


def rmsprop(
    param: Tensor, grad: Tensor, square_avg: Tensor, momentum_buffer: Tensor | None, grad_avg: Tensor | None, *,
    scale: float, weight_decay: float, lr: float, alpha: float, eps: float, momentum: float, centered: bool,
) -> None:  # fmt: skip
    g = _gradient(param, grad, scale, weight_decay)
    square_avg.mul_(alpha).addcmul_(g, g, value=1 - alpha)
    variance = square_avg
    if centered:
        assert grad_avg is not None
        grad_avg.lerp_(g, 1 - alpha)
        variance = square_avg.addcmul(grad_avg, grad_avg, value=-1)
    divisor = root(variance).add_(eps)
    if momentum > 0:
        assert momentum_buffer is not None
        momentum_buffer.mul_(momentum).addcdiv_(g, divisor)
        param.add_(momentum_buffer, alpha=-lr)
    else:
        param.addcdiv_(g, divisor, value=-lr)


def adam(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, max_exp_avg_sq: Tensor | None, *,
    scale: float, weight_decay: float, step_size: float, beta1: float, beta2: float, eps: float,
    correction: float, shrink: float, amsgrad: bool,
) -> None:  # fmt: skip
    """`shrink`: the parameter is first taken times this, AdamW's decay; `correction`: sqrt(1 - beta2 ** step)."""
    g = _gradient(param, grad, scale, weight_decay)
    param.mul_(shrink)
    exp_avg.lerp_(g, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    largest = exp_avg_sq
    if amsgrad:
        assert max_exp_avg_sq is not None
        largest = torch.maximum(max_exp_avg_sq, exp_avg_sq, out=max_exp_avg_sq)
    param.addcdiv_(exp_avg, (root(largest) / correction).add_(eps), value=-step_size)


def average(average: Tensor, x: Tensor, weight: float) -> None:
    """average + weight * (x - average)."""
    average.lerp_(x, weight)


def sum_of_squares(x: Tensor) -> float:
    """In float64. Blocks of 4096: 16 lanes a block, each summed in order, added in pairs; then the blocks in order."""
    wide = torch.nn.functional.pad(x.double(), (0, -x.numel() % BLOCK))
    lanes = wide.square().view(-1, BLOCK // LANES, LANES).cumsum(1)[:, -1]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return float(lanes.flatten().cumsum(0)[-1]) if x.numel() else 0.0


def finite(x: Tensor) -> bool:
    """Neither NaN nor infinity in it."""
    return bool(x.isfinite().all())


def root(x: Tensor) -> Tensor:
    """The correctly rounded square root."""
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(x.detach().numpy()))


@functools.cache
def fuses() -> bool:
    """Does torch multiply and add in one rounding here? (1 + e)(1 - e) - 1 is -e², or 0 when rounded twice."""
    e = 2.0**-30
    one = torch.ones(64, dtype=torch.float64)
    return bool((torch.addcmul(-one, one + e, one - e) == -e * e).all())


def _gradient(param: Tensor, grad: Tensor, scale: float, weight_decay: float) -> Tensor:
    """As the optimizer takes it: scaled (negative to maximize), decayed."""
    g = grad * scale
    return g.add(param, alpha=weight_decay) if weight_decay != 0 else g
