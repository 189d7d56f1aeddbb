"""An update whose gradient is not finite: is it made, left out, or does it end the run? Pure: the decision with its reason.

The gradient that is judged is always the whole update's, over all workers and all servers, so everybody decides the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from echelon.errors import NotFinite

Rule = Literal["pass", "skip", "refuse"]
"""The strategy's `nonfinite`."""

MOST = 8
"""Suspects that are named at most."""


@dataclass(frozen=True)
class Suspect:
    """A worker's part of an update that is not finite (-1: nobody's by itself, only their sum), and in which parameter."""

    worker: int
    name: str


@dataclass(frozen=True)
class Make:
    """The update is made."""

    reason: str = ""


@dataclass(frozen=True)
class Skip:
    """Nobody makes the update; it counts as one that moves nothing."""

    reason: str


@dataclass(frozen=True)
class Refuse:
    """Nobody makes the update, and the run ends."""

    reason: str
    workers: tuple[int, ...]
    """Whose parts they were; () when that is not known."""


Verdict = Make | Skip | Refuse


def verdict(rule: Rule, finite: bool, suspects: Sequence[Suspect] = (), what: str = "gradient") -> Verdict:
    """What becomes of an update whose gradient is finite or not; or of the copy that a worker brings to a meeting."""
    if finite:
        return Make()
    reason = told(suspects, what)
    if rule == "pass":
        return Make(f"{reason}, and nonfinite=pass")
    if rule == "skip":
        return Skip(reason)
    return Refuse(reason, workers(suspects))


def workers(suspects: Sequence[Suspect]) -> tuple[int, ...]:
    return tuple(sorted({s.worker for s in suspects if s.worker >= 0}))


def told(suspects: Sequence[Suspect], what: str = "gradient") -> str:
    """`the gradient of worker 1 is not finite: `head.weight` and 2 more parameters`"""
    names = list(dict.fromkeys(s.name for s in suspects if s.name))
    where = f": `{names[0]}`" if names else ""
    if len(names) > 1:
        more = len(names) - 1
        where += f" and {more}{' or' * (len(names) >= MOST)} more parameter{'s' * (more > 1)}"
    ranks = workers(suspects)
    if not ranks:
        return f"the {what} is not finite{where}"
    return f"the {what} of worker {', '.join(map(str, ranks))} is not finite{where}"


def error(refused: Refuse, step: int, rank: int) -> NotFinite:
    """What worker `rank` raises. Whose part it was not only says that another worker failed first."""
    raised = NotFinite(
        f"step {step}: {refused.reason}, and nonfinite=refuse",
        remedy="Nothing of this step was applied. Look at that worker's batch and loss (torch.autograd.set_detect_anomaly finds the "
        "operation); clip_norm or a lower learning rate may help, and nonfinite=skip leaves such updates out.",
        rank=rank,
        step=step,
        peers=refused.workers,
    )
    raised.consequence = bool(refused.workers) and rank not in refused.workers
    return raised


def to_plain(suspects: Sequence[tuple[int, int]]) -> list[list[int]]:
    """(worker, key of a range) as servers tell each other and workers."""
    return [list(s) for s in sorted(set(suspects))[:MOST]]


def from_plain(told: Any) -> list[tuple[int, int]]:
    return [(int(worker), int(key)) for worker, key in list(told)[:MOST]]
