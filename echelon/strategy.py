"""Every knob of a run, as one frozen record with three spellings: a string, TOML, Python.

`allreduce,accumulate=4` == {"accumulate": 4} == Strategy(accumulate=4). Precedence, highest first: --set, --strategy,
--config, init(...), default: see `merge`. Nothing here starts anything, so a mistake costs nobody a launch.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from echelon import coding, demands
from echelon.errors import StrategyError
from echelon.spelling import from_text, spell, unknown
from echelon.spelling import need as _need

FORMS = ("allreduce", "ps", "sharded", "auto")
AXES = ("data", "tensor", "pipeline")


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a run trains. Fields that cost accuracy are never on unless asked for."""

    form: Literal["allreduce", "ps", "sharded", "auto"] = "allreduce"
    """How gradients meet: summed among the workers, on parameter servers, sharded, or chosen by measurement."""

    data: int = 0
    """Replicas of the model; 0 means whatever the other axes leave over."""

    tensor: int = 1
    """Workers that share each layer."""

    pipeline: str = "1"
    """Stages the model is cut into; `3+1` gives three workers to stage 0 and one to stage 1."""

    batch: Literal["global", "per-worker"] = "global"
    """Whether the loader's batch is cut over the workers (same answer at any size) or taken whole by each."""

    loss: Literal["mean", "sum"] = "mean"
    """What the script's loss is over its samples; a sum needs no weight when parts meet."""

    accumulate: int = 1
    """Loader batches in one optimizer step."""

    microbatches: int = 1
    """Pieces each batch is cut into to save memory; changes no number (BatchNorm sees one piece at a time)."""

    seed: int = 0
    """From which weights, data order and sample randomness follow."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What forward computes in (autocast); parameters and sums stay in their own type."""

    sync_batchnorm: bool = True
    """BatchNorm over the global batch; false makes it local and changes the answer."""

    ema: float = 0.0
    """Decay of an exponential average of the weights, 0 for none; evaluate and save use it."""

    clip_norm: float = 0.0
    """Gradients are clipped to this global norm before every step, 0 for never."""

    nonfinite: Literal["pass", "skip", "refuse"] = "pass"
    """What becomes of an update whose gradient is not finite: made as torch would, made by nobody, or the run ends with its cause."""

    warmup_steps: int = 0
    """With batch=per-worker: steps over which the learning rate grows to workers × its value."""

    scale_lr: bool = True
    """With batch=per-worker: multiply the learning rate by the number of workers."""

    strict: bool = False
    """Stop with full names when a parameter gets no gradient, instead of leaving it alone."""

    bucket_mib: float = 25.0
    """Gradients leave when this many MiB are ready: smaller hides more, larger costs less a message."""

    first_bucket_mib: float = 1.0
    """The first message is small, so that communication starts early; below 8 MiB in all there is one message."""

    tensorboard: bool = False
    """Write TensorBoard files into the run folder."""

    compress: str = "none"
    """Lossy coding of gradients for slow links: fp16, bf16, int8, 1bit, topk:SHARE or powersgd:RANK."""

    backend: Literal["auto", "gloo", "nccl", "native", "threads"] = "auto"
    """What carries collectives; auto: NCCL for one GPU a worker, the compiled core on CPUs (gloo without it), alone nothing."""

    update: Literal["sync", "bounded", "async", "local"] = "sync"
    """How updates meet on a parameter server."""

    staleness: int = 0
    """With update=bounded: how many versions behind a worker may compute."""

    backup: int = 0
    """With ps: workers whose late parts of a step are not waited for."""

    aggregate: int = 0
    """With ps: parts that make an update, also more than there are workers; 0 for one of each worker, less `backup`."""

    compensation: float = 0.0
    """With update=async: λ of delay compensation; a late gradient g becomes g + λ·g·g·(parameters now - parameters then)."""

    stale_lr: Literal["same", "divided"] = "same"
    """With update=async: the learning rate of a gradient that is n updates late stays the same, or is divided by n."""

    local_steps: int = 1
    """With update=local: steps between two meetings."""

    outer: Literal["mean", "geo", "diloco"] = "mean"
    """With update=local: what a meeting makes of the copies: their mean, each one's way added, or an outer optimizer's step."""

    outer_lr: float = 0.7
    """With outer=diloco: learning rate of the outer optimizer, SGD with Nesterov momentum."""

    outer_momentum: float = 0.9
    """With outer=diloco: momentum of the outer optimizer; 0 with outer_lr=1 is the mean."""

    apply: Literal["worker", "server"] = "worker"
    """Who runs the optimizer under ps."""

    servers_share: float = -1.0
    """With ps and apply=worker: the part of the summing that servers take, 0 to 1; -1 takes what the hosts' links carry best."""

    replicas: int = -1
    """Copies of what a server holds, on another one that takes over when it dies: 0 or 1; -1 is 1 where servers hold weights and are two or more."""

    level: int = 3
    """What sharded splits: 1 optimizer state, 2 and gradients, 3 and parameters."""

    schedule: Literal["1f1b", "gpipe", "interleaved", "zero-bubble"] = "1f1b"
    """The order of forward and backward in a pipeline."""

    wrap_mib: float = 32.0
    """With sharded: parameters are gathered and freed by modules of about this size; smaller saves memory, larger costs less a message."""

    shard_workers: int = 0
    """With sharded: workers that share one copy of the model; every such set has one (neighbours, best of one host). 0 for all."""

    offload: bool = False
    """With sharded on GPUs: optimizer state lies in host memory."""

    tensor_plan: str = ""
    """With tensor: how modules are split where the plan should be another, as PATTERN:column, gather, row, vocab or whole, joined by `+`."""

    tensor_padding: bool = False
    """With tensor: heads that do not divide are dealt unevenly, some workers having one more; without it they are refused."""

    cut: str = ""
    """With pipeline: names of the modules with which the second and later stages begin, joined by `+`; by default found by measurement."""

    chunks: int = 2
    """With schedule=interleaved: stages of each worker."""

    shares: str = ""
    """With pipeline=3+1 and the like: how fast each worker of a stage is, as 2:1:1+1; by default measured, and then two runs may differ in last bits."""

    slices: int = 0
    """Fixed cuts of each batch whose sums are taken in order, for the same bits at any world size."""

    parts: Literal["static", "dynamic"] = "static"
    """Equal parts for every worker, or parts by measured speed."""

    spares: int = 0
    """Workers kept ready to replace a dead one."""

    checkpoint_every: int = 0
    """Steps between checkpoints, 0 for none."""

    keep: int = 2
    """Complete checkpoints kept."""

    checkpoint_dir: str = ""
    """Folder or URL (s3://…) under which each run's checkpoints lie; by default the run's own folder."""
    stuck: Literal["stop", "wait"] = "stop"
    """What follows when a worker holds up the run: stop it with exit code 124, or wait however long it takes."""

    stuck_s: float = 30.0
    """With stuck=stop: seconds from the alarm to the stop; ten times as long before the first committed step."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name))
        for name in ("accumulate", "microbatches", "local_steps", "tensor", "keep", "chunks"):
            _need(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        _need(
            0.0 <= self.ema < 1.0,
            f"ema={self.ema} must lie in [0, 1)",
            "0.999 averages over about 1000 steps.",
        )
        _need(
            self.checkpoint_every >= 0,
            f"checkpoint_every={self.checkpoint_every} must not be negative",
            "0 saves only where the script says run.checkpoint().",
        )
        _need(self.clip_norm >= 0, f"clip_norm={self.clip_norm} must not be negative")
        _need(self.bucket_mib > 0 and self.first_bucket_mib > 0, "a bucket must hold something")
        _need(self.stuck_s >= 0, f"stuck_s={self.stuck_s} must not be negative")
        coding.read(self.compress)
        _need(
            bool(re.fullmatch(r"[1-9]\d{0,3}(\+[1-9]\d{0,3})*", self.pipeline)),
            f"pipeline={self.pipeline} is not a number of stages",
            "pipeline=2 cuts the model in two; pipeline=3+1 gives three workers to stage 0 and one to stage 1.",
        )
        _need(
            not self.shares or bool(re.fullmatch(r"[1-9]\d{0,5}([:+][1-9]\d{0,5})*", self.shares)),
            f"shares={self.shares} are not whole numbers of at least 1",
            "shares=2:1:1+1: of stage 0 the first worker is twice as fast as the two others; one number for each worker.",
        )
        _need(self.data >= 0, f"data={self.data} must not be negative")
        _need(self.level in (1, 2, 3), f"level={self.level} must be 1, 2 or 3")

    @property
    def alone(self) -> bool:
        """Every worker takes whole batches of the script's loader by itself, and counts its own steps."""
        return self.update == "local" or self.dealt

    @property
    def widths(self) -> tuple[int, ...]:
        """Workers of each stage of the pipeline, in one replica of the model."""
        if "+" in self.pipeline:
            return tuple(int(width) for width in self.pipeline.split("+"))
        return (1,) * int(self.pipeline)

    @property
    def stages(self) -> int:
        return len(self.widths)

    @property
    def wide(self) -> bool:
        """Some stage of the pipeline has several workers, which share its micro-batches."""
        return max(self.widths) > 1

    @property
    def speeds(self) -> tuple[tuple[int, ...], ...]:
        """Of each worker of each stage, where `shares` names them; else nothing."""
        return tuple(
            tuple(int(speed) for speed in stage.split(":")) for stage in self.shares.split("+") if stage
        )

    @property
    def splits_model(self) -> bool:
        """No worker keeps the whole model."""
        return (self.form == "sharded" and self.level > 1) or self.tensor > 1 or self.stages > 1

    @property
    def dealt(self) -> bool:
        """Workers take pieces of the data as they ask for them, and are not at one place."""
        return self.form == "ps" and (self.update == "async" or self.backup > 0 or self.aggregate > 0)

    @property
    def first_parts(self) -> bool:
        """An update is made of the first parts of a step."""
        return self.dealt and self.update == "sync"

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their default: what a person set."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        }

    @property
    def servers_hold(self) -> bool:
        """Weights and optimizer state lie on parameter servers."""
        return self.form == "ps" and (self.apply == "server" or self.update == "bounded" or self.dealt)

    def copies(self, num_servers: int) -> int:
        """How many copies there are of what each server holds."""
        wanted = self.replicas if self.replicas >= 0 else 1
        return wanted if self.servers_hold and num_servers > 1 else 0

    def __str__(self) -> str:
        rest = [f"{k}={spell(v)}" for k, v in self.changed().items() if k != "form"]
        return ",".join([self.form, *rest])


NAMES = tuple(f.name for f in dataclasses.fields(Strategy) if f.name != "form")
_HINTS = get_type_hints(Strategy)


def parse(text: str) -> dict[str, Any]:
    """`ps,update=async` -> {"form": "ps", "update": "async"}; raises StrategyError with the nearest name."""
    fields: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, eq, value = (s.strip() for s in item.partition("="))
        if not eq:
            if key not in FORMS:
                raise unknown(key, (*FORMS, *NAMES), "strategy")
            key, value = "form", key
        if key in fields:
            what = f"two forms, {fields[key]} and {value}" if key == "form" else f"{key} twice"
            raise StrategyError(f"strategy {text!r} names {what}", remedy="Name each once.")
        fields[key] = read_field(key, value)
    return fields


def parse_set(items: Iterable[str]) -> dict[str, Any]:
    """["accumulate=4", "seed=1"] -> fields, as `--set` gives them."""
    fields: dict[str, Any] = {}
    for item in items:
        key, eq, value = (s.strip() for s in item.partition("="))
        if not eq:
            raise StrategyError(f"--set {item!r} has no value", remedy="Write --set KEY=VALUE.")
        if key in fields:
            raise StrategyError(f"--set {key} is given twice", remedy="Name each once.")
        fields[key] = read_field(key, value)
    return fields


def read_field(key: str, value: Any) -> Any:
    """The value of one field from text or TOML, checked; `form` is allowed here."""
    if key != "form" and key not in NAMES:
        raise unknown(key, NAMES, "field")
    hint = _HINTS[key]
    if isinstance(value, str) and hint is not str:
        value = from_text(key, value, hint)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if hint is str:
        value = str(value)
    _check_type(key, value)
    return value


def load(path: Path) -> dict[str, Any]:
    """Fields from a TOML file: `strategy = "ps,..."` and any field at the top level."""
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise StrategyError(f"--config {path} does not exist") from None
    except tomllib.TOMLDecodeError as error:
        raise StrategyError(f"--config {path} is not TOML: {error}") from None
    fields = parse(str(table.pop("strategy", "")))
    return fields | {key: read_field(key, value) for key, value in table.items()}


def merge(*layers: Mapping[str, Any]) -> Strategy:
    """One Strategy from layers of fields, the first given winning: set, strategy, config, init."""
    fields: dict[str, Any] = {}
    for layer in reversed(layers):
        fields |= layer
    return Strategy(**{k: read_field(k, v) for k, v in fields.items()})


require_servers = demands.servers
require_whole = demands.whole
require_built = demands.built


def _check_type(key: str, value: Any) -> None:
    hint = _HINTS[key] if "_HINTS" in globals() else get_type_hints(Strategy)[key]
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if value not in choices:
            near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.4)
            hinted = f"Did you mean {near[0]}? " if near else ""
            raise StrategyError(
                f"{key}={value} is not known", remedy=f"{hinted}Choose from {', '.join(choices)}."
            )
    elif hint is float and isinstance(value, int) and not isinstance(value, bool):
        return
    elif not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise StrategyError(f"{key}={value!r} must be {hint.__name__}")
