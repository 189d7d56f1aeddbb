"""What a strategy demands: servers, workers, and which fields go together where workers take pieces of the data by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon import copying
from echelon.errors import StrategyError

if TYPE_CHECKING:
    from echelon.strategy import Strategy


def dealt(strategy: Strategy) -> None:
    """Raises StrategyError with what to write instead."""
    for name in ("compensation", "stale_lr"):
        _need(
            strategy.update == "async" or name not in strategy.changed(),
            f"{name} goes with update=async, not with {strategy.update}: elsewhere gradients are not late in this way",
            f"Write update=async,{name}=…, or leave it out.",
        )
    _need(strategy.compensation >= 0, f"compensation={strategy.compensation:g} is below 0")
    for name, value in (("backup", strategy.backup), ("aggregate", strategy.aggregate)):
        _need(value >= 0, f"{name}={value} is below 0")
        _need(
            not value or (strategy.form == "ps" and strategy.update == "sync"),
            f"{name}={value} goes with ps and update=sync, not with {strategy.form} and update={strategy.update}",
            f"Start it with --servers 1 --strategy ps,{name}={value}, or leave it out.",
        )
    _need(
        not (strategy.backup and strategy.aggregate),
        f"backup={strategy.backup} and aggregate={strategy.aggregate} both say how many parts make an update",
        "aggregate=r takes the first r parts; backup=b the first of all workers but b. Name one.",
    )
    _need(
        not strategy.dealt or strategy.compress == "none",
        f"compress={strategy.compress} with backup: servers take gradients as they are",
        "Leave compress out.",
    )


NOT_YET = ("auto",)
"""Forms and axes that can be named already."""


def built(strategy: Strategy) -> None:
    """Raises StrategyError for what this version does not have yet, before anything starts."""
    missing = [f"the form `{strategy.form}`"] if strategy.form in NOT_YET else []
    missing += ["the axis tensor"] if strategy.tensor > 1 and "tensor" in NOT_YET else []
    missing += ["the axis pipeline"] if strategy.stages > 1 and "pipeline" in NOT_YET else []
    missing += [f"`{name}`" for name in ("slices", "parts", "spares") if name in strategy.changed()]
    missing += ["backend=threads"] if strategy.backend == "threads" else []
    if missing:
        raise StrategyError(
            f"this version of Echelon does not have {' nor '.join(missing)} yet",
            remedy="What works today: README, table of strategies.",
        )


GOES_WITH = {
    "level": "sharded",
    "wrap_mib": "sharded",
    "shard_workers": "sharded",
    "offload": "sharded",
    "schedule": "pipeline",
    "cut": "pipeline",
    "chunks": "pipeline",
    "shares": "pipeline",
    "tensor_plan": "tensor",
    "tensor_padding": "tensor",
}
"""Fields that mean nothing without a form or an axis."""


def divided(strategy: Strategy) -> None:
    """Fields of the forms that split a model. Raises StrategyError with what to write instead."""
    there: set[str] = {strategy.form}
    there |= {"tensor"} if strategy.tensor > 1 else set()
    there |= {"pipeline"} if strategy.stages > 1 else set()
    for name, form in GOES_WITH.items():
        example = form if form == "sharded" else f"{form}=2"
        _need(
            form in there or name not in strategy.changed(),
            f"{name} goes with {form}, and this is {strategy}",
            f"Write {example},{name}={getattr(strategy, name)}, or leave it out.",
        )
    _need(
        strategy.form != "sharded" or strategy.level == 1 or len(set(strategy.widths)) == 1,
        f"sharded,level={strategy.level} with pipeline={strategy.pipeline}: workers of one stage that have different micro-batches cannot "
        "bring each other its parameters",
        f"Write level=1, or give every stage as many workers: data={max(strategy.widths)},pipeline={len(strategy.widths)}.",
    )
    _need(
        strategy.shard_workers >= 0 and strategy.wrap_mib >= 0, "shard_workers and wrap_mib are not below 0"
    )
    _need(
        not (there & {"sharded", "tensor", "pipeline"})
        or (strategy.compress == "none" and strategy.update == "sync"),
        f"compress={strategy.compress} and update={strategy.update} with a model that is split: gradients are sent as they are, in step",
        "Leave them out, or use allreduce.",
    )
    _need(
        not (there & {"tensor", "pipeline"}) or not (strategy.servers_hold or strategy.dealt),
        f"{strategy}: servers that hold the weights hold a whole model, and with tensor or pipeline it is split",
        "Use ps with apply=worker, where servers sum gradients, or leave tensor and pipeline out.",
    )
    wide(strategy)
    _shares(strategy)


def _shares(strategy: Strategy) -> None:
    counts = tuple(len(stage) for stage in strategy.speeds)
    example = "+".join(":".join("1" * width) for width in strategy.widths)
    _need(
        not strategy.shares or (strategy.wide and counts == strategy.widths),
        f"shares={strategy.shares} are of {'+'.join(map(str, counts))} workers, and pipeline={strategy.pipeline} has others",
        f"One number for each worker of each stage: shares={example} makes all of a stage alike."
        if strategy.wide
        else "Leave them out: every stage has one worker, which does all of its micro-batches.",
    )


def wide(strategy: Strategy) -> None:
    """Pipelines whose stages have several workers. Nothing that a script adds makes these right: asked before anything starts."""
    if not strategy.wide:
        return
    data = max(1, strategy.data)
    more = "+".join(str(width * data) for width in strategy.widths)
    _need(
        strategy.data in (0, 1) and strategy.tensor == 1,
        f"pipeline={strategy.pipeline} says how many workers each stage has, so data and tensor are 1",
        f"The workers of a stage share its micro-batches as replicas would share batches: write pipeline={more}"
        if data > 1 and strategy.tensor == 1
        else f"Leave tensor out, or give every stage one worker: pipeline={strategy.stages},tensor={strategy.tensor}.",
    )
    _need(
        strategy.schedule != "interleaved",
        f"schedule=interleaved gives every worker several stages, and pipeline={strategy.pipeline} gives a stage several workers",
        f"Write schedule=1f1b, gpipe or zero-bubble beside it, or pipeline={strategy.stages} with schedule=interleaved.",
    )


def whole(strategy: Strategy) -> None:
    """Raises StrategyError for fields that need one another. Only once the script's own fields are in."""
    _need(
        strategy.warmup_steps == 0 or strategy.batch == "per-worker",
        "warmup_steps goes with batch=per-worker",
        "With batch=global the learning rate is not scaled.",
    )
    _need(
        strategy.form == "ps" or strategy.update == "sync",
        f"update={strategy.update} goes with ps, not with {strategy.form}",
        f"Start it with --servers 1 --strategy ps,update={strategy.update}, or leave it out.",
    )
    _need(
        not strategy.alone or strategy.checkpoint_every == 0,
        f"checkpoint_every={strategy.checkpoint_every} counts steps, and under update={strategy.update} every worker counts its own",
        "Call run.checkpoint() between two epochs; a run that is stopped saves anyway.",
    )
    _need(
        strategy.staleness >= 0,
        f"staleness={strategy.staleness} is below 0",
        "0 is sync; 4 lets a worker compute on parameters that are four updates old.",
    )
    _need(
        strategy.servers_share == -1 or 0 <= strategy.servers_share <= 1,
        f"servers_share={strategy.servers_share:g} is no share",
        "It is between 0 (workers sum everything) and 1 (servers do), or -1 for what the hosts' links carry best.",
    )
    _need(
        strategy.staleness == 0 or strategy.update == "bounded",
        f"staleness={strategy.staleness} goes with update=bounded, not with {strategy.update}",
        f"Write update=bounded,staleness={strategy.staleness}.",
    )
    _need(
        strategy.replicas in (-1, 0, 1),
        f"replicas={strategy.replicas}: there is one copy of what a server holds, or none",
        "With replicas=1 a server may die at any time; two at once are one too many.",
    )
    _need(
        strategy.replicas < 1 or strategy.servers_hold,
        "replicas=1 goes with ps where servers hold something: apply=server, update=bounded or async, backup or aggregate",
        "With apply=worker every worker has everything, and servers only sum.",
    )
    _need(
        strategy.apply == "worker" or strategy.form == "ps",
        f"apply=server goes with ps, not with {strategy.form}",
        "Start it with --servers 1 --strategy ps,apply=server, or leave it out.",
    )
    _need(
        (strategy.apply == "worker" and strategy.update == "sync") or strategy.compress == "none",
        f"compress={strategy.compress} with apply=server, bounded, async or local: servers take gradients as they are",
        "Use update=sync with apply=worker, where the workers code what they send, or leave compress out.",
    )
    for problem in copying.problems(strategy):
        _need(False, *problem)
    dealt(strategy)
    divided(strategy)


def _need(true: bool, message: str, remedy: str = "") -> None:
    if not true:
        raise StrategyError(message, remedy=remedy)


def workers(strategy: Strategy, num_workers: int) -> None:
    """With so many workers?"""
    _need(
        strategy.backup < max(1, num_workers),
        f"backup={strategy.backup} of {num_workers} workers leaves nobody to wait for",
        "At least one worker's part must count in each step: use fewer backups or more workers.",
    )


def servers(strategy: Strategy, num_servers: int) -> None:
    """Raises StrategyError when ps has no servers, or another form has some. Alone (plain python) nothing meets: do not ask."""
    _need(
        strategy.form != "ps" or num_servers > 0,
        "the strategy ps needs parameter servers, and this run has none",
        "Say how many: echelon run --workers 4 --servers 1 --strategy ps train.py",
    )
    _need(
        strategy.form == "ps" or num_servers == 0,
        f"--servers {num_servers} goes with the strategy ps, and this is {strategy.form}",
        f"Add --strategy ps: echelon run --servers {num_servers} --strategy ps train.py; or leave --servers out.",
    )
    _need(
        strategy.replicas < 1 or num_servers > 1,
        "replicas=1 needs a second server to hold the copy, and this run has one",
        "Start it with --servers 2, or leave replicas out.",
    )
