"""BatchNorm over the global batch, on CPU too: statistics are gathered from all ranks, by their true counts.

Gradients of unequal parts are weighted by the parts' shares, which torch's own SyncBatchNorm does not do; a stand-in's
sample counts for nothing. The module stays the same object with the same state dict.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon import activity
from echelon.clock import Deadline
from echelon.comm.group import Group, Lost, Outcome
from echelon.parallel.gradsync import Share

NORM_LIMIT_S = 1800.0


@dataclass(frozen=True)
class Within:
    """The micro-batch of a pipeline that is being computed."""

    share: Share
    note: Callable[[_BatchNorm, Tensor, Tensor], None]
    """Takes its mean and variance: the running ones are moved in the order of micro-batches, whoever computed them."""


class NormSync:
    """What synchronised norms of a run share: their own group, the current share, and where a loss is told."""

    def __init__(self, group: Group, share: Callable[[], Share], lost: Callable[[Outcome], None]) -> None:
        self.group, self.lost = group, lost
        self.within: Within | None = None
        self._share, self._asks = share, True

    def share(self) -> Share:
        """Of the micro-batch, or else of the micro-step."""
        return self.within.share if self.within is not None else self._share()

    @contextlib.contextmanager
    def by_itself(self) -> Iterator[None]:
        """Inside, this rank's moments are taken for everybody's, and nobody is asked."""
        self._asks = False
        try:
            yield
        finally:
            self._asks = True

    @activity.named("synchronised BatchNorm")
    def gather(self, mine: Tensor) -> Tensor | None:
        if not self._asks:
            return None
        out = torch.empty(self.group.size, *mine.shape, dtype=mine.dtype, device=mine.device)
        outcome = self.group.all_gather(out, mine).wait(Deadline.after(NORM_LIMIT_S))
        if isinstance(outcome, Lost):
            self.lost(outcome)
            return None
        return out


class _Normalise(torch.autograd.Function):
    """y = (x - mean) * invstd * weight + bias with the mean and variance of the global batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor,
                count: Tensor, sync: NormSync) -> Tensor:  # fmt: skip
        shape = [1, -1] + [1] * (x.dim() - 2)
        xhat = (x - mean.view(shape)) * invstd.view(shape)
        ctx.save_for_backward(xhat, weight, invstd, count)
        ctx.sync, ctx.share, ctx.shape, ctx.has_bias = sync, sync.share(), shape, bias is not None
        y = xhat if weight is None else xhat * weight.view(shape)
        return y if bias is None else y + bias.view(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (dy,) = grads
        xhat, weight, invstd, count = ctx.saved_tensors
        dims = [d for d in range(dy.dim()) if d != 1]
        sum_dy, sum_dy_xhat = dy.sum(dims), (dy * xhat).sum(dims)
        share: Share = ctx.share
        mine = (
            torch.stack([sum_dy, sum_dy_xhat]) * share.weight
            if share.counts
            else torch.zeros_like(torch.stack([sum_dy, sum_dy_xhat]))
        )
        every = ctx.sync.gather(mine)
        total = every.sum(0) if every is not None else mine
        scale = 1.0 / (share.weight * count) if share.counts else torch.zeros_like(count)
        mean_dy, mean_dy_xhat = (total[0] * scale).view(ctx.shape), (total[1] * scale).view(ctx.shape)
        factor = invstd if weight is None else invstd * weight
        dx = (dy - mean_dy - xhat * mean_dy_xhat) * factor.view(ctx.shape)
        return (
            dx,
            (sum_dy_xhat if weight is not None else None),
            (sum_dy if ctx.has_bias else None),
            None,
            None,
            None,
            None,
        )


def normalise(module: _BatchNorm, x: Tensor, sync: NormSync) -> Tensor:
    """One training forward: gather moments, update the running ones, normalise."""
    module._check_input_dim(x)
    dims = [d for d in range(x.dim()) if d != 1]
    channels = x.shape[1]
    values = x.numel() // channels if sync.share().counts else 0
    with torch.no_grad():
        stats = x.detach().to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        mine = torch.zeros(2 * channels + 1, dtype=stats.dtype, device=x.device)
        if values:
            var, mean = torch.var_mean(stats, dims, correction=0)
            torch.cat([mean, var * values, mean.new_tensor([values])], out=mine)
        every = sync.gather(mine)
        every = mine[None] if every is None else every
        means, m2s, counts = every[:, :channels], every[:, channels:-1], every[:, -1:]
        count = counts.sum()
        mean = (means * counts).sum(0) / count.clamp(min=1)
        m2 = (m2s + counts * (means - mean) ** 2).sum(0)
        if x.device.type == "cpu" and count == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {x.shape} in the whole world"
            )
        (sync.within.note if sync.within else move_running)(module, mean, m2 / (count - 1).clamp(min=1))
        invstd = torch.rsqrt(m2 / count.clamp(min=1) + module.eps)
    y = _Normalise.apply(
        x, module.weight, module.bias, mean.to(x.dtype), invstd.to(x.dtype), count.to(x.dtype), sync
    )
    assert isinstance(y, Tensor)
    return y


def move_running(module: _BatchNorm, mean: Tensor, var: Tensor) -> None:
    """The running moments go towards those of one more batch."""
    if not module.track_running_stats or module.running_mean is None or module.running_var is None:
        return
    assert module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    factor = module.momentum if module.momentum is not None else 1.0 / float(module.num_batches_tracked)
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), factor)
    module.running_var.lerp_(var.to(module.running_var.dtype), factor)


def synchronise(model: nn.Module, sync: NormSync) -> int:
    """Makes every BatchNorm of the model global; returns how many there are. The modules stay what they are."""
    found = [
        m for m in model.modules() if isinstance(m, _BatchNorm) and not hasattr(type(m), "_echelon_sync")
    ]
    for module in found:
        module.__class__ = _synced(type(module), sync)  # type: ignore[assignment]
    return len(found)


def has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(m, _BatchNorm) for m in model.modules())


def has_no_memory(model: nn.Module) -> bool:
    """Some BatchNorm keeps no running statistics, so evaluation uses those of its batch."""
    return any(isinstance(m, _BatchNorm) and not m.track_running_stats for m in model.modules())


def _synced(cls: type[nn.Module], sync: NormSync) -> type[nn.Module]:
    """A subclass whose training forward is global. A copy of the module is of the script's own class again."""

    def forward(self: _BatchNorm, x: Tensor) -> Tensor:
        if (
            not self.training or type(x).__name__ == "FakeTensor"
        ):  # being recorded: there are no numbers to gather
            return cls.forward(self, x)  # type: ignore[no-any-return]
        return _eager(self, x, sync)

    def __reduce_ex__(self: _BatchNorm, protocol: Any) -> Any:
        return _blank, (cls,), self.__getstate__()

    names = {
        "forward": forward,
        "__reduce_ex__": __reduce_ex__,
        "_echelon_sync": sync,
        "__module__": cls.__module__,
    }
    return type(cls.__name__, (cls,), names)


def _blank(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)


def _eager(module: _BatchNorm, x: Tensor, sync: NormSync) -> Tensor:
    return normalise(module, x, sync)


_eager._torchdynamo_disable = True  # type: ignore[attr-defined]  # collectives stay outside compiled graphs
