"""What a server sees of an update's gradient before it is made, and what is decided about it over all servers: how far it is clipped, and
whether it is made at all. Where nobody asks for either, nothing here is called."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from echelon.errors import PeerLost
from echelon.native import update
from echelon.ps.judge import Reporter, Summary, Whole, whole
from echelon.ps.service import Request
from echelon.ps.shard import Shard
from echelon.ps.steps import Decided, added, factor_of, parts_of
from echelon.verdict import Refuse, Rule, Skip, Suspect, verdict

RULES: dict[str, Rule] = {"pass": "pass", "skip": "skip", "refuse": "refuse"}


def rule_of(request: Request) -> Rule:
    """What a worker wants done with an update that is not finite."""
    return RULES[str(request.head.get("nonfinite", "pass"))]


def needed(clip_norm: float, rule: Rule, num_servers: int) -> bool:
    """Must an update be looked at before it is made? One server that only clips sees the norm when it makes it."""
    return rule != "pass" or (clip_norm > 0 and num_servers > 1)


def summary(shard: Shard, requests: list[Request]) -> Summary:
    """Of the parts' sum over what this server holds."""
    parts = {request.peer.rank: parts_of(shard, request) for request in requests}
    used = {int(key) for request in requests for key in request.head["used"]}
    keys = [key for _, keys in requests[0].head["groups"] for key in keys if key in used]
    return summed({key: added([part[key] for part in parts.values()]) for key in keys}, parts)


def summed(sums: Mapping[int, Tensor], parts: Mapping[int, Mapping[int, Tensor]]) -> Summary:
    """Of these sums, and of which worker's parts."""
    squares, wrong = [], []
    for key, total in sums.items():
        squares.append(update.sum_of_squares(total))
        if not math.isfinite(squares[-1]) and not update.finite(total):
            wrong.append(key)
    whose = [
        pair
        for key in wrong
        for pair in [(w, key) for w, part in parts.items() if not update.finite(part[key])] or [(-1, key)]
    ]
    return Summary(squares, not wrong, whose)


def decided(found: Whole, rule: Rule, clip_norm: float) -> tuple[Decided, Refuse | None]:
    """What every server does with the update."""
    suspects = [Suspect(worker, "") for worker, _ in found.whose]
    match verdict(rule, found.finite, suspects):
        case Skip():
            return Decided(skips=True, whose=found.whose), None
        case Refuse() as refused:
            return Decided(skips=True, whose=found.whose), refused
    return Decided(factor_of(found.squares, clip_norm) if clip_norm > 0 else 1.0), None


def over_all(
    reporter: Reporter | None, num_servers: int, shard: int, model: int, name: tuple[int, int], mine: Summary,
    lost: Callable[[], PeerLost | None] = lambda: None,
) -> Whole:  # fmt: skip
    """What all servers see together. Without any lock: they may wait for each other. Raises what lost() gives."""
    if reporter is None or num_servers < 2:
        return whole({shard: mine})
    return reporter.verdict(shard, model, name, mine, lost)


def refuse(requests: Sequence[Request], found: Decided) -> None:
    """Whoever brought a part of an update that is refused is told whose it was; nothing was made."""
    for request in requests:
        request.answer({"updates": 0, "stop": False, **found.plain("refuse")})
