"""What training takes in a worker's memory under each form, and what would fit: pure.

Counted is what lasts through a step: parameters, gradients, optimizer state, buffers, and what sharding gathers for a moment. What a forward
keeps for its backward depends on the batch, and Python and torch themselves take some hundred MiB: both are added by whoever knows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.strategy import Strategy

GIB, MIB = 1 << 30, 1 << 20
NEW_VALUES = 32 * MIB
"""At level 1: parameters that are on their way from those who stepped them."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Bytes of one model in training, where it lies whole."""

    parameters: int
    gradients: int
    """Of the parameters that are trained."""

    state: int = 0
    """What the optimizer keeps."""

    other: int = 0
    """Buffers; the averaged weights of ema."""

    largest: int = 0
    """Parameters of the largest single layer: no cut goes through it."""

    unit: int = 0
    """Parameters of the largest unit that sharded would gather; 0 when it is not known: then the size that was asked for is assumed."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """How the model lies on workers. The default is a whole copy on each."""

    level: int = 0
    """What is sharded: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters."""

    shards: int = 1
    stages: int = 1
    tensor: int = 1
    unit: int = 32 * MIB
    """Parameters that sharded gathers at a time."""

    largest_stage: float = 0.0
    """The part of the model that the largest stage has; 0 when it is not known yet: then even stages are assumed."""

    state_elsewhere: bool = False
    """The optimizer runs on servers."""

    banked: bool = False
    """A step has several micro-batches: gradients of the earlier ones are kept beside the buffers in which the sum meets."""


@dataclass(frozen=True, kw_only=True)
class Needed:
    """Bytes on one worker."""

    parameters: int
    gradients: int
    state: int
    other: int
    gathered: int = 0
    """Parameters and gradients of layers that are whole for a moment."""

    banked: int = 0
    """Gradients of earlier micro-batches."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.state + self.other + self.gathered + self.banked


@dataclass(frozen=True)
class Have:
    """What a worker may use."""

    limit: int
    source: str
    """Whose limit it is, as a person would say it: "the control group's limit"."""

    sharers: int = 1
    """Workers of this host that live under the same limit."""

    @property
    def share(self) -> int:
        return self.limit // max(1, self.sharers)


@dataclass(frozen=True)
class Fits:
    spare: int
    """Bytes that are left for activations."""


@dataclass(frozen=True)
class Tight:
    """It may not: told, and tried."""

    message: str


@dataclass(frozen=True)
class TooLarge:
    """What is said when training cannot fit."""

    message: str
    remedy: str


def split_of(strategy: Strategy, workers: int) -> Split:
    """How a strategy lays a model over so many workers."""
    model = strategy.stages * strategy.tensor
    level = strategy.level if strategy.form == "sharded" else 0
    return Split(
        level=level,
        shards=strategy.shard_workers or max(1, workers // model) if level else 1,
        stages=strategy.stages,
        tensor=strategy.tensor,
        unit=int(strategy.wrap_mib * MIB),
        state_elsewhere=strategy.servers_hold,
        banked=level < 2 and strategy.accumulate * strategy.microbatches > 1,
    )


def needed(training: Training, split: Split) -> Needed:
    """The bytes that last on a worker (with pipeline: on the one with the largest stage)."""
    rest = (
        max(split.largest_stage or 1 / split.stages, _share(training.largest, training.parameters))
        / split.tensor
    )
    params, grads, state = (int(rest * x) for x in (training.parameters, training.gradients, training.state))
    state = 0 if split.state_elsewhere else state
    unit = min(params, int((training.unit or max(split.unit, training.largest)) / split.tensor))
    gathered = 0
    if split.level >= 1:
        state //= split.shards
    if split.level == 1:
        gathered += min(params, NEW_VALUES)
    if split.level >= 2:
        grads //= split.shards
        gathered += 2 * unit  # the gradients of one unit, and of another that is being summed and cut
        whole, params = params, params // split.shards
        # the parameters: of all units until their backward is over, whose gradients then come; or of one unit and the next
        gathered += max(0, whole - grads) if split.level == 2 else 2 * unit
    banked = grads if split.banked else 0
    return Needed(
        parameters=params,
        gradients=grads,
        state=state,
        other=training.other,
        gathered=gathered,
        banked=banked,
    )


def peak(need: Needed, base: int, activations: int) -> int:
    """The predicted peak of a worker's process: what lasts, what the process took before the model, what a forward keeps."""
    return need.total + base + activations


def short(need: Needed, have: Have, base: int, activations: int = 0) -> bool:
    """Might memory not suffice if the allocator keeps what is freed? The C library as it is then grows to more than twice of what is in use:
    blocks of some MiB, in whose gaps the next ones do not fit."""
    return 3 * (need.total + activations) + base > have.share


def judge(
    training: Training, split: Split, have: Have, workers: int, name: str, base: int = 0
) -> Fits | Tight | TooLarge:
    """Can training under `split` (called `name`) fit at all? `base` is what the process takes without the model, as far as it is known
    to count; activations come on top."""
    need = needed(training, split)
    if need.total + base <= have.share:
        return Fits(have.share - need.total - base)
    if need.total <= have.share:
        return Tight(
            f"memory is short: training this model under {name} takes {said(need.total)} on each worker, the process itself has "
            f"{said(base)} already, and a worker has {said(have.share)}. {_what_fits(training, split, have, workers)}"
        )
    return TooLarge(_shortfall(need, have, name), _what_fits(training, split, have, workers))


def _shortfall(need: Needed, have: Have, name: str) -> str:
    parts = [("parameters", need.parameters), ("gradients", need.gradients), ("optimizer state", need.state),
             ("buffers", need.other), ("layers gathered", need.gathered), ("gradients of earlier micro-batches", need.banked)]  # fmt: skip
    listed = " + ".join(f"{what} {said(count)}" for what, count in parts if count)
    shared = f", shared by {have.sharers} workers" if have.sharers > 1 else ""
    return (
        f"training this model under {name} takes {said(need.total)} on each worker, and a worker has {said(have.share)}: "
        f"{said(need.total - have.share)} are missing\n"
        f"  {listed}, before the first activation; {have.source} is {said(have.limit)}{shared}."
    )


def _what_fits(training: Training, split: Split, have: Have, workers: int) -> str:
    fits = fitting(training, have.share, workers, split)
    if fits:
        which = " or ".join(f"--strategy {name} ({said(count)} a worker)" for name, count in fits)
        answer = f"With {workers} workers and the same memory these fit: {which}."
    else:
        enough = workers_enough(training, have.share, split)
        answer = (
            f"No form fits the number of workers here ({workers}) with {said(have.share)} each; --strategy sharded fits {enough} such "
            "workers on further hosts."
            if enough
            else f"No form fits workers with {said(have.share)} each: give them more memory."
        )
    if training.parameters + training.other > have.share // 2:
        answer += (
            f" The weights alone are {said(training.parameters)}: put `with run.build():` around the construction of the model, "
            "so that no worker ever holds all of them."
        )
    return answer


def advice(have: Have | None) -> str:
    """What a script is told whose allocation failed: nobody knows yet what for."""
    shared = f", shared by {have.sharers} workers" if have is not None and have.sharers > 1 else ""
    room = (
        f"This worker has {said(have.share)} ({have.source} is {said(have.limit)}{shared}). "
        if have is not None
        else ""
    )
    return f"{room}{LESS}"


LESS = (
    "What takes less of it: --set microbatches=4 (activations); --strategy sharded or pipeline=2 (parameters, gradients, optimizer "
    "state); `with run.build():` around the construction of a model whose weights alone are too large."
)


def fitting(
    training: Training, share: int, workers: int, split: Split | None = None
) -> list[tuple[str, int]]:
    """Forms that fit so many workers with `share` bytes each: how they are written, and their bytes a worker. The cheapest in
    traffic of each kind."""
    now = split or Split()
    found = []
    for level in (1, 2, 3):
        banked = now.banked and level < 2
        count = needed(training, Split(level=level, shards=workers, unit=now.unit, banked=banked)).total
        if count <= share and (level, workers) != (now.level, now.shards):
            found.append((f"sharded,level={level}", count))
            break
    for stages in range(2, workers + 1):
        count = needed(training, Split(stages=stages, banked=True)).total
        if workers % stages == 0 and count <= share and stages != now.stages:
            found.append((f"pipeline={stages}", count))
            break
    return found


def workers_enough(training: Training, share: int, split: Split | None = None) -> int:
    """The least number of workers with `share` bytes each that `sharded` needs; 0 when no number does."""
    unit = (split or Split()).unit
    for workers in range(2, 4097):
        if needed(training, Split(level=3, shards=workers, unit=unit)).total <= share:
            return workers
    return 0


def state_copies(kind: str, options: Mapping[str, Any]) -> float:
    """How many tensors of a parameter's size this optimizer of torch keeps for it; 0 for one that we do not know."""
    kind = kind.lower()
    if kind in ("adam", "adamw"):
        return 3 if options.get("amsgrad") else 2
    if kind in ("nadam", "radam", "adamax", "adadelta", "rprop"):
        return 2
    if kind == "sgd":
        return 1 if options.get("momentum") else 0
    if kind == "rmsprop":
        return 1 + bool(options.get("momentum")) + bool(options.get("centered"))
    return 1 if kind in ("adagrad", "asgd", "muon") else 0


def said(count: int) -> str:
    """1536 MiB as people say it: 1.5 GiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            value = count / unit
            return f"{value:.1f} {name}" if value < 100 else f"{value:.0f} {name}"
    return f"{count} bytes"


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
