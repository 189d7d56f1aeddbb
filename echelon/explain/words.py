"""A plan as lines for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from echelon.launch.local import Job
from echelon.mesh import memory
from echelon.mesh.memory import Needed, Training, said
from echelon.parallel import needs
from echelon.parallel.pipeline.bubble import simulate
from echelon.parallel.pipeline.contract import Action
from echelon.parallel.pipeline.cut import Cut, Outline
from echelon.parallel.sharded.split import groups_of
from echelon.piped import Piped
from echelon.prepare import model as models
from echelon.run import Run
from echelon.show.lines import COLUMNS, fold


def lines(run: Run, job: Job, training: Training, explain: bool) -> list[str]:
    """What would be done; with `explain` module by module, with the reasons."""
    workers = f"{job.num_workers} worker{'s' * (job.num_workers > 1)}"
    servers = f" + {job.num_servers} server{'s' * (job.num_servers > 1)}" if job.num_servers else ""
    told = [f"{job.script} · {workers}{servers} · {run.strategy}"]
    for piece in (_tensor, _sharded, _pipeline):
        told += piece(run, explain)
    if len(told) == 1:
        told.append("every worker has the whole model")
    told += _memory(run, training)
    if not explain and (run.strategy.splits_model):
        told.append("--explain says it module by module")
    return [line for each in told for line in _folded(each)]


def _folded(text: str) -> list[str]:
    """Lines that fit; those of a list stay one below the other."""
    indent = " " * (len(text) - len(text.lstrip()))
    first, *rest = fold(text, COLUMNS - 2)
    return [
        first,
        *(line if line.startswith(f"{indent} ") else f"{indent}  {line.lstrip()}" for line in rest),
    ]


def _tensor(run: Run, explain: bool) -> list[str]:
    told = []
    for shared in run.prepared.shared.values():
        if not shared.alone:
            told.append(shared.summary())
            told += [f"  {line}" for line in shared.lines()] if explain else []
    return told


def _sharded(run: Run, explain: bool) -> list[str]:
    told = run.prepared.sharding.lines()
    if not explain:
        return told
    for model in run.models:
        names = {id(module): name for name, module in models.unwrapped(model).named_modules()}
        for sync in run.prepared.sharding.syncs:
            for unit in sync.units:
                groups = [group for group in groups_of(unit) if id(group.modules[0]) in names]
                size = sum(
                    p._orig_size.numel() * p.sharded_param.element_size()
                    for g in groups
                    for p in g.fsdp_params
                )
                for group in groups[:1]:
                    told.append(f"  {names[id(group.modules[0])] or 'the rest'}: {said(size)}")
    return told


def _pipeline(run: Run, explain: bool) -> list[str]:
    told = []
    for piped in run.prepared.piped.values():
        if piped.made is None or piped.outline is None:
            told.append("the script ended before its first run.step: where the model is cut is not known")
            continue
        stages = piped.made.reason.split("; ")
        told.append(f"pipeline of {piped.num_stages} stages, measured here; {stages[-1]}")
        told += [f"  stage {line}" for line in stages[:-1]]
        if explain:
            told += _owned(piped.made, piped.outline)
        micros = run.strategy.microbatches
        share = simulate(
            piped.dealer.orders(micros), seconds=_seconds(piped, piped.made, piped.outline)
        ).bubble
        told.append(
            f"bubble {share:.0%} of the time with {micros} micro-batch{'es' * (micros > 1)} ({run.strategy.schedule}); "
            "more micro-batches make it smaller"
        )
    return told


def _owned(made: Cut, outline: Outline) -> list[str]:
    """The parameters of each stage."""
    told = []
    for stage in range(made.num_stages):
        names = [name for name in outline.sizes if stage in made.holders(name)]
        modules = dict.fromkeys(name.rpartition(".")[0] or name for name in names)
        told.append(f"  stage {stage} has {', '.join(modules) or 'no parameters'}")
    told += [
        f"  {name} is in stages {' and '.join(map(str, stages))}: its gradients are added"
        for name, stages in made.shared.items()
    ]
    return told


def _seconds(piped: Piped, made: Cut, outline: Outline) -> Callable[[int, Action], float]:
    """What each action takes, of what a forward and backward of its stage were measured to take together."""
    whole = [0.0] * piped.num_stages
    for item, stage in zip(outline.items, made.stages, strict=True):
        if stage >= 0:
            whole[stage] += item.ns
    whole[-1] += outline.loss_ns
    parts = {"forward": 1 / 3, "backward": 2 / 3, "weights": 1 / 3}
    if piped.strategy.schedule == "zero-bubble":
        parts["backward"] = 1 / 3

    def seconds(worker: int, action: Action) -> float:
        return whole[action.stage] * parts[action.kind] * 1e-9

    return seconds


def _memory(run: Run, training: Training) -> list[str]:
    split = dataclasses.replace(
        memory.split_of(run.strategy, run.world_size), tensor=1
    )  # they are pieces already
    for piped in run.prepared.piped.values():
        split = dataclasses.replace(split, largest_stage=_largest(piped))
    need = memory.needed(training, split)
    told = [f"memory a worker {_parts(need)}; activations and the process itself come on top"]
    have = needs.room(run.device, run.name)
    if have is not None and run.device.type == "cpu":
        have = dataclasses.replace(have, sharers=run.world_size)
    if have is not None and need.total > have.share:
        told.append(
            f"too large for {run.world_size} workers on this machine: each has {said(have.share)} ({have.source} is {said(have.limit)}), "
            f"{said(need.total - have.share)} are missing"
        )
    return told


def _parts(need: Needed) -> str:
    parts = [("parameters", need.parameters), ("gradients", need.gradients), ("optimizer state", need.state), ("buffers", need.other),
             ("layers gathered", need.gathered), ("gradients of earlier micro-batches", need.banked)]  # fmt: skip
    return f"{said(need.total)}: {', '.join(f'{what} {said(count)}' for what, count in parts if count)}"


def _largest(piped: Piped) -> float:
    """The part of the parameters that the largest stage has."""
    if piped.made is None or piped.outline is None:
        return 0.0
    made, sizes = piped.made, piped.outline.sizes
    each = [0] * piped.strategy.stages
    for name, size in sizes.items():
        for place in {stage % piped.strategy.stages for stage in made.holders(name)}:
            each[place] += size
    return max(each) / max(1, sum(sizes.values()))
