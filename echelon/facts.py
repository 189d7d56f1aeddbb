"""What a run says about itself: first lines, beats, and the sentences of its self-checks."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING, Any

from torch import nn

from echelon.errors import LoopError
from echelon.events import Beat
from echelon.parallel import norm
from echelon.prepare.loader import Feed
from echelon.step import Machine

if TYPE_CHECKING:
    from echelon.run import Run


def beat(machine: Machine, rank: int, epochs: int) -> Beat:
    counters = machine.counters
    times = counters.times
    return Beat(
        rank=rank,
        step=counters.global_step,
        epoch=counters.epoch,
        num_steps=counters.global_step,
        samples=counters.samples,
        data_s=times.data_s,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        wait_s=machine.wait_s(),
        total_s=time.perf_counter() - times.began if times.began else 0.0,
        doing="training" if counters.global_step else "starting",
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def lines(run: Run, feed: Feed) -> list[str]:
    """The first lines of a run: what makes a step, and what would change the answer."""
    strategy, workers = run.strategy, run.world_size
    size = feed.user.batch_size or getattr(feed.user.batch_sampler, "batch_size", None)
    global_batch = (
        None
        if size is None
        else size * strategy.accumulate * (workers if strategy.batch == "per-worker" else 1)
    )
    said = [f"strategy {strategy} · {workers} worker{'s' * (workers > 1)} · {run.device}"]
    if global_batch is None:
        said.append("global batch: as the loader yields it")
    else:
        each = (
            size
            if strategy.batch == "per-worker"
            else f"{size / workers:g}"
            if size and size % workers
            else size and size // workers
        )
        text = f"global batch {global_batch} samples a step · {each} a worker and forward"
        if strategy.microbatches > 1:
            text += f" in {strategy.microbatches} micro-batches"
        text += f" · accumulate {strategy.accumulate}"
        if strategy.accumulate > 1:
            text += f": the step's batch is {strategy.accumulate} × {global_batch // strategy.accumulate}"
        said.append(text)
    said.append(_learning_rate(run))
    changes = _changes(run)
    said.append(
        "same answer as one process"
        if not changes
        else "not the answer of one process: " + "; ".join(changes)
    )
    return said


def _learning_rate(run: Run) -> str:
    strategy = run.strategy
    if strategy.batch == "per-worker" and strategy.scale_lr:
        over = f" over {strategy.warmup_steps} warm-up steps" if strategy.warmup_steps else ""
        return f"learning rate scaled × {run.world_size}{over} (batch=per-worker)"
    return "learning rate as the script says (not scaled)"


def _changes(run: Run) -> list[str]:
    """What makes this run differ from one process in plain torch; empty when nothing does."""
    strategy, several = run.strategy, run.world_size > 1
    found = []
    if strategy.batch == "per-worker" and several:
        found.append("batch=per-worker makes the batch grow with the workers")
    if several and any(_drops(m) for model in run.models for m in model.modules()):
        found.append("dropout draws other masks on each worker")
    if several and not strategy.sync_batchnorm and any(norm.has_batchnorm(m) for m in run.models):
        found.append("sync_batchnorm=false keeps BatchNorm's moments local")
    if strategy.microbatches > 1 and any(norm.has_batchnorm(m) for m in run.models):
        found.append("BatchNorm sees one micro-batch at a time")
    return found


def _drops(module: nn.Module) -> bool:
    """Dropout layers, and modules that keep a rate of their own (LSTM, attention). F.dropout in a forward is not seen."""
    rate = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(rate, float) and rate > 0.0


def refuse_unused(run: Run, optimizer: Any) -> None:
    """strict: names every trained parameter without a gradient, split by why, on this rank."""
    unused = [name for sync in optimizer.syncs for name in sync.unused()]
    if not unused:
        return
    ran = run.strict_watch.ran if run.strict_watch else set()
    outside = [n for n in unused if n not in ran]
    inside = [n for n in unused if n in ran]
    said = f"strict: {len(unused)} parameters got no gradient in this step on rank {run.rank}"
    if outside:
        said += "\n  not in forward: " + ", ".join(outside)
    if inside:
        said += "\n  in forward, but not in the loss: " + ", ".join(inside)
    raise LoopError(
        said,
        remedy="Use them, freeze them (requires_grad_(False)), or leave strict off: they are then left alone.",
        rank=run.rank,
    )
