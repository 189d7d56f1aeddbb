"""What a run says about itself: first lines, beats, and the sentences of its self-checks."""

from __future__ import annotations

import dataclasses
import math
import resource
import time
from typing import TYPE_CHECKING, Any

from torch import nn

from echelon.errors import LoopError
from echelon.events import Beat, Facts
from echelon.parallel import norm
from echelon.prepare.loader import Feed
from echelon.step import Machine
from echelon.strategy import Strategy
from echelon.tally import Tally

if TYPE_CHECKING:
    from echelon.run import Run


UNEVEN = (
    "some worker had no backward in a step in which others had one. Its code between backward and step saw\n"
    "  no gradients (clipping with torch's function does nothing there): use run.clip_grad_norm."
)


def beat(machine: Machine, rank: int, tally: Tally) -> Beat:
    counters = machine.counters
    times = counters.times
    return Beat(
        rank=rank,
        step=counters.global_step,
        epoch=counters.epoch,
        num_steps=counters.global_step,
        samples=counters.samples,
        all_samples=counters.all_samples,
        data_s=times.data_s,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        wait_s=machine.wait_s() + counters.times.pipe_s,
        total_s=time.perf_counter() - times.began if times.began else 0.0,
        doing="training" if counters.global_step else "starting",
        sent_bytes=sum(sync.wire.traffic.sent_bytes for sync in machine.syncs),
        plain_bytes=sum(sync.wire.traffic.plain_bytes for sync in machine.syncs),
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **tally.told(),
    )


def lines(run: Run, feed: Feed) -> list[str]:
    """The first lines of a run: what makes a step, and what would change the answer.

    What the launcher said above them (strategy, workers) is left out.
    """
    size = feed.user.batch_size or getattr(feed.user.batch_sampler, "batch_size", None)
    said = [
        *_chosen(run),
        _batch(run.strategy, run.world.part[1], size),
        f"{_compute(run)} · {_learning_rate(run)}",
        *_wires(run),
        *(shared.summary() for shared in run.prepared.shared.values() if not shared.alone),
        *run.prepared.sharding.lines(),
        *run.prepared.tables.lines(),
    ]
    changes = _changes(run)
    if not changes:
        return [*said, "same answer as one process"]
    return [*said, "not the answer of one process:", *(f"  {change}" for change in changes)]


def _chosen(run: Run) -> list[str]:
    workers = f"{run.world_size} worker{'s' * (run.world_size > 1)}"
    if run.member is None:
        return [f"strategy {run.strategy} · {workers}"]
    if run.member.description.get("strategy") == dataclasses.asdict(run.strategy):
        return []
    return [f"strategy {run.strategy} (with what the script sets)"]


def _batch(strategy: Strategy, workers: int, size: int | None) -> str:
    """`global batch 16 samples a step · 4 a worker in each forward · accumulate 2: the step's batch is 2 × 8`"""
    if size is None:
        return "global batch: as the loader yields it"
    per_worker = strategy.batch == "per-worker"
    met, accumulate = size * (workers if per_worker else 1), strategy.accumulate
    whole = met * accumulate
    pieces = [
        f"global batch {whole} sample{'s' * (whole != 1)} a step",
        f"{_each(size, strategy.microbatches, 1 if per_worker else workers)}"
        f"{' in each forward' * (accumulate > 1 or strategy.microbatches > 1)}",
    ]
    if strategy.microbatches > 1:
        pieces.append(f"{strategy.microbatches} micro-batches a batch")
    pieces.append(
        f"accumulate {accumulate}: the step's batch is {accumulate} × {met}"
        if accumulate > 1
        else "accumulate 1 (the strategy's)"
    )
    return " · ".join(pieces)


def _each(size: int, microbatches: int, workers: int) -> str:
    """A worker's samples in one forward: the batch is cut into micro-batches, and each of them over the workers."""
    slices = min(microbatches, size)
    largest = math.ceil(size / slices)
    least, most = size // slices // workers, math.ceil(largest / workers)
    if least:
        return f"{most} a worker" if least == most else f"{least} or {most} a worker"
    have = "has" if largest == 1 else "have"
    few = f" ({largest} of {workers} workers {have} work)" if largest < workers else ""
    return f"at most {most} a worker{few}"


def _compute(run: Run) -> str:
    device = run.device.type if run.world_size > 1 else str(run.device)
    precision = f" in {run.strategy.precision}" if run.strategy.precision != "fp32" else ""
    return f"computes on {device}{precision}"


def _wires(run: Run) -> list[str]:
    """Sockets that are not ours ask for no token: whoever reads the first lines should know."""
    backend, address = run.world.groups.backend, run.place.address
    if backend == "alone":
        return []
    if backend == "native":
        if not address:
            return ["gradients through shared memory (no socket is open for them)"]
        return [f"gradients over TCP that asks for the run's token, not encrypted ({address} here)"]
    where = (
        f"are on each host's address in the run's network ({address} here)" if address else "stay on loopback"
    )
    return [f"gradients over {backend}: its sockets {where} and ask for no token"]


def _learning_rate(run: Run) -> str:
    strategy = run.strategy
    if strategy.batch == "per-worker" and strategy.scale_lr:
        over = f" over {strategy.warmup_steps} warm-up steps" if strategy.warmup_steps else ""
        return f"learning rate scaled × {run.world.part[1]}{over} (batch=per-worker)"
    return "learning rate as the script says (not scaled)"


def _changes(run: Run) -> list[str]:
    """What makes this run differ from one process in plain torch; empty when nothing does."""
    strategy, several = run.strategy, run.world.part[1] > 1
    found = []
    if strategy.compress != "none" and several:
        found.append(f"compress={strategy.compress} sends gradients with fewer bits (docs/compression.md)")
    if strategy.batch == "per-worker" and several:
        found.append("batch=per-worker makes the batch grow with the workers")
    if several and any(_drops(m) for model in run.models for m in model.modules()):
        found.append("dropout draws other masks on each worker")
    if strategy.update == "bounded" and strategy.staleness:
        found.append(f"gradients may be computed on parameters that are {strategy.staleness} updates old")
    if strategy.update == "async" and several:
        found.append("every worker's batch is an update by itself, in the order in which they come")
    if strategy.update == "local":
        found += _local(strategy, several)
    if (
        several
        and (not strategy.sync_batchnorm or strategy.alone)
        and any(norm.has_batchnorm(m) for m in run.models)
    ):
        found.append("BatchNorm's moments stay each worker's own (sync_batchnorm=false, async, local)")
    if several and any(norm.has_no_memory(m) for m in run.models):
        found.append("BatchNorm without running statistics evaluates on each worker's own part")
    if strategy.microbatches > 1 and any(norm.has_batchnorm(m) for m in run.models):
        found.append("BatchNorm sees one micro-batch at a time")
    return found


def _local(strategy: Strategy, several: bool) -> list[str]:
    steps = f"{strategy.local_steps} step{'s' * (strategy.local_steps > 1)}"
    if strategy.outer == "diloco":
        numbers = f"lr {strategy.outer_lr:g}, momentum {strategy.outer_momentum:g}"
        return [
            f"every {steps} an outer optimizer ({numbers}) moves the weights towards the mean of the workers' copies"
        ]
    if not several:
        return []
    if strategy.outer == "geo":
        return [f"every worker trains its own copy; after {steps} each adds its share of how far it went"]
    return [f"every worker trains its own copy; after {steps} the copies are averaged"]


def tell_draws(run: Run) -> None:
    """The first step drew random numbers that no layer of the model announced."""
    several = run.world.part[1] > 1
    if several and run.is_main and not any(_drops(m) for model in run.models for m in model.modules()):
        why = "the first step drew random numbers (F.dropout, noise), others on each worker"
        run.emit(Facts(rank=0, lines=["not the answer of one process:", f"  {why}"]))


def _drops(module: nn.Module) -> bool:
    """Dropout layers, and modules that keep a rate of their own (LSTM, attention). F.dropout shows in the first step."""
    rate = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(rate, float) and rate > 0.0


def refuse_unused(run: Run, optimizer: Any) -> None:
    """strict: names every trained parameter without a gradient, split by why, on this rank."""
    unused = [name for sync in optimizer.syncs for name in sync.unused()]
    if not unused:
        return
    ran = run.prepared.strict_watch.ran if run.prepared.strict_watch else set()
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
