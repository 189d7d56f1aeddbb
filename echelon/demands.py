"""What a strategy demands: servers, workers, and which fields go together where workers take pieces of the data by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        not strategy.first_parts or strategy.replicas < 1,
        "replicas=1 with backup or aggregate: nobody has a copy of what the first server decides",
        "Leave replicas out, or use update=async.",
    )
    _need(
        not strategy.dealt or strategy.compress == "none",
        f"compress={strategy.compress} with backup: servers take gradients as they are",
        "Leave compress out.",
    )


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
