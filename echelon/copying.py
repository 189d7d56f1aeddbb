"""update=local, where every worker trains its own copy: what it goes with, as pairs of what is wrong and what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from echelon.strategy import Strategy


def problems(strategy: Strategy) -> Iterator[tuple[str, str]]:
    """What update=local does not go with, and what only it goes with: what is wrong, and what to do."""
    if strategy.update != "local":
        for name in ("local_steps", "outer", "outer_lr", "outer_momentum"):
            if name in strategy.changed():
                value = getattr(strategy, name)
                yield (
                    f"{name}={value} goes with update=local, not with {strategy.update}",
                    f"Write ps,update=local,{name}={value}.",
                )
        return
    if strategy.outer != "diloco" and {"outer_lr", "outer_momentum"} & strategy.changed().keys():
        yield (
            f"outer={strategy.outer} has no outer optimizer, and its numbers were given",
            "Write outer=diloco.",
        )
    if strategy.outer_lr < 0 or not 0 <= strategy.outer_momentum < 1:
        numbers = f"outer_lr={strategy.outer_lr:g},outer_momentum={strategy.outer_momentum:g}"
        yield numbers, "The rate is 0 or more, the momentum at least 0 and below 1."
    if strategy.apply == "server":
        yield (
            "apply=server with update=local: every worker runs the script's optimizer on its own copy",
            "Leave apply out.",
        )
    if strategy.batch == "per-worker":
        yield (
            "batch=per-worker with update=local: every worker takes whole batches already",
            "Leave batch out.",
        )
    if strategy.ema:
        yield (
            f"ema={strategy.ema:g} with update=local: every worker would average its own copy's way between meetings",
            "Leave ema out: meetings average already; or use update=sync.",
        )
