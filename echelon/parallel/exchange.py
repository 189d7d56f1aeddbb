"""Values that cross ranks in a script: gather, reduce, and the mean over unequal counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from echelon import activity
from echelon.clock import Deadline
from echelon.comm.group import Group, Lost, Op, Outcome
from echelon.parallel import agree
from echelon.parallel.gradsync import Share
from echelon.ps.live import LiveGroup

LIMIT_S = 1800.0
ReduceOp = Literal["mean", "sum", "min", "max"]


class Exchange:
    """Small collectives on a group of their own, so that they never stand in the order of gradients.

    A lost peer completes an operation with what this rank has and is told to `lost`: the step will not commit.
    """

    def __init__(self, group: Group, lost: Callable[[Outcome], None]) -> None:
        self.group, self.lost = group, lost
        # the answer of a GPU would have to be waited for, and alone there is nobody to ask
        asks = not isinstance(group, LiveGroup)  # there, a server notices
        self._asks = asks and not group.local and self._device().type == "cpu"

    def _met(self, outcome: Outcome) -> bool:
        if isinstance(outcome, Lost):
            self.lost(outcome)
            return False
        return True

    def total(self, values: list[float]) -> list[float]:
        """Sums over ranks in float64."""
        wire = torch.tensor(values, dtype=torch.float64, device=self._device())
        return (
            wire.tolist() if self._over(wire, "sum", f"{activity.label()} ({len(values)} values)") else values
        )

    def every(self, values: list[float], what: str = "") -> list[list[float]]:
        """Each rank's values, in rank order. `what` must be one everywhere."""
        mine = torch.tensor(values, dtype=torch.float64, device=self._device())
        what = what or f"{activity.label()} ({len(values)} values of each)"
        if self._asks and len(values) <= agree.ROOM:
            outcome, out = agree.gathered(self.group, what, mine, Deadline.after(LIMIT_S))
        else:
            self._ask(what)
            out = torch.zeros(self.group.size, len(values), dtype=torch.float64, device=mine.device)
            outcome = self.group.all_gather(out, mine).wait(Deadline.after(LIMIT_S))
        return out.tolist() if self._met(outcome) else [values]

    def _over(self, wire: Tensor, op: Op, what: str) -> bool:
        """`wire` (flat) becomes its sum, min or max over ranks, unless they call different things."""
        small = self._asks and len(wire) <= agree.ROOM and wire.dtype in (torch.float64, torch.int64)
        if not small:
            self._ask(what)
            return self._met(self.group.all_reduce(wire, op).wait(Deadline.after(LIMIT_S)))
        outcome, rows = agree.gathered(self.group, what, wire, Deadline.after(LIMIT_S))
        if not self._met(outcome):
            return False
        wire.copy_(rows.sum(0) if op == "sum" else rows.amin(0) if op == "min" else rows.amax(0))
        return True

    def _ask(self, what: str) -> None:
        if self._asks:
            self._met(agree.ask(self.group, what, Deadline.after(LIMIT_S)))

    def _device(self) -> torch.device:
        return self.group.buffer(0).device

    def reduce(self, x: Tensor, op: ReduceOp, weight: float) -> Tensor:
        """x over all ranks; mean by weight; a rank of weight 0 counts for nothing."""
        x = x.detach()
        what = f"{activity.label() or 'reduce'}(…, {op!r}) of {x.dtype} {list(x.shape)}"
        if op in ("min", "max"):
            wire = x.clone(memory_format=torch.contiguous_format)
            if weight == 0:
                info = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
                wire.fill_(info.max if op == "min" else info.min)
            if x.numel() <= agree.ROOM:  # wide enough for all types, so that they travel beside the mark
                wire = wire.to(torch.float64 if x.is_floating_point() else torch.int64)
            self._over(wire.view(-1), op, what)
            return wire.to(x.dtype)
        exact = x.dtype if not x.is_floating_point() and op == "sum" else torch.float64
        scale = weight if op == "mean" else float(weight > 0)
        body = (
            x.to(exact).reshape(-1) * (scale if exact is torch.float64 else int(scale))
            if scale
            else torch.zeros(x.numel(), dtype=exact, device=x.device)
        )
        wire = torch.cat([body, torch.tensor([weight], device=x.device).to(exact)])
        self._over(wire, "sum", what)
        value = wire[:-1] / wire[-1] if op == "mean" else wire[:-1]
        keeps = x.is_floating_point() or op == "sum"
        return value.reshape(x.shape).to(x.dtype if keeps else torch.float64)

    def words(self, mine: list[str]) -> list[str]:
        """The sorted union of everybody's words (no newlines in them)."""
        data = "\n".join(mine).encode()
        counts, rows = self.rows(torch.tensor(list(data), dtype=torch.uint8), len(data))
        joined, found = bytes(rows.tolist()), set[str]()
        for n in counts:
            found |= set(filter(None, joined[:n].decode().split("\n")))
            joined = joined[n:]
        return sorted(found)

    @activity.named("run.evaluate")
    def ratios(self, totals: dict[str, list[float]]) -> dict[str, float]:
        """{name: [sum, count]} of each rank -> {name: sum / count} of all; a rank without samples learns the names."""
        names = self.words(sorted(totals))
        sums = self.total([v for name in names for v in totals.get(name, [0.0, 0.0])])
        pairs = zip(names, sums[::2], sums[1::2], strict=True)
        return {name: total / count if count else float("nan") for name, total, count in pairs}

    @activity.named("run.gather")
    def gather(self, x: Tensor, share: Share) -> Tensor:
        """The rows of all ranks in global order; differentiable. Rows of a stand-in are left out."""
        out = _Gather.apply(x, self, share)
        assert isinstance(out, Tensor)
        return out

    def rows(self, x: Tensor, count: int) -> tuple[list[int], Tensor]:
        """Everybody's first `count` rows, padded on the way to the longest."""
        what = f"{activity.label()} of {x.dtype} {list(x.shape[1:])} rows"
        counts = [int(c[0]) for c in self.every([float(count)], what)]
        if len(counts) != self.group.size:
            return counts, x[:count]  # lost: what this rank has
        most = max([*counts, 1])
        x = x.to(self._device()) if not x.is_cuda else x
        mine = x.new_zeros(most, *x.shape[1:])
        mine[:count] = x[:count]
        out = x.new_zeros(len(counts), most, *x.shape[1:])
        if not self._met(self.group.all_gather(out, mine).wait(Deadline.after(LIMIT_S))):
            out = mine.expand(len(counts), *mine.shape)
        return counts, torch.cat([out[r, :n] for r, n in enumerate(counts)])


class _Gather(torch.autograd.Function):
    """Backward: what all ranks' losses say about my rows, each by its rank's share, in units of my own share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, share: Share) -> Tensor:
        rows = x.shape[0] if share.counts else 0
        counts, out = exchange.rows(x.detach(), rows)
        ctx.exchange, ctx.share, ctx.shape = exchange, share, x.shape
        ctx.start, ctx.rows = sum(counts[: exchange.group.rank]), rows
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        share: Share = ctx.share
        wire = grad * share.weight if share.counts else torch.zeros_like(grad)
        wire = wire.contiguous()
        ctx.exchange._met(ctx.exchange.group.all_reduce(wire).wait(Deadline.after(LIMIT_S)))
        mine = torch.zeros(ctx.shape, dtype=grad.dtype, device=grad.device)
        if share.counts:
            mine[: ctx.rows] = wire[ctx.start : ctx.start + ctx.rows] / share.weight
        return mine, None, None


class _Scaled(torch.autograd.Function):
    """Shows `value`, but hands `factor` times the gradient to `total`."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.factor, None, None


def shown_as(total: Tensor, value: float, factor: float) -> Tensor:
    """A loss that reads as `value` and whose gradient is factor × the gradient of `total`."""
    out = _Scaled.apply(total, torch.full_like(total.detach(), value), factor)
    assert isinstance(out, Tensor)
    return out
