"""What to do when a step did not meet. Pure: the decision with its reason; the run acts on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.control.roster import FAILED
from echelon.errors import EchelonError, LoopError, PeerLost
from echelon.faults import ON_PURPOSE


@dataclass(frozen=True)
class Replay:
    """Undo what was not committed and run its batches again, in the same group."""


@dataclass(frozen=True)
class Regroup:
    """Undo what was not committed, wait until whoever was killed was started again, and run its batches again with it."""


@dataclass(frozen=True)
class Stop:
    """End the run with this error."""

    error: EchelonError


def after_loss(
    peers: Sequence[int],
    reason: str,
    seats: Mapping[int, Mapping[str, Any]],
    rank: int,
    step: int,
    why_not: str = "this version knows one world a run",
    what: str = "",
) -> Replay | Regroup | Stop:
    """A step was lost on `rank`: `peers` are those gone as far as known, `seats` the coordinator's roster; `why_not` is "" where a
    killed worker is started again, and somebody was killed. `what` was lost, if it was not the step itself but a call after it.
    Whoever left the loop is named.
    """
    if reason == ON_PURPOSE:
        return Replay()
    left = {peer: seats[peer]["step"] for peer in peers if seats.get(peer, {}).get("state") == "left"}
    if left:
        who = ", ".join(f"worker {peer} left the loop after step {at}" for peer, at in left.items())
        remedy = (
            "All workers take the same number of steps: decide together when to leave, e.g. with run.reduce."
        )
        return Stop(
            LoopError(
                f"{who}, while worker {rank} was in step {step}",
                remedy=remedy,
                rank=rank,
                step=step,
                peers=tuple(left),
            )
        )
    if not why_not and not any(seats.get(peer, {}).get("state") == FAILED for peer in peers):
        return Regroup()
    gone = f"worker {', '.join(map(str, peers))} is gone: " if peers else ""
    told = f"{what} after step {step} did not meet" if what else f"step {step} did not meet"
    remedy = f"It could not be made again: {why_not}." if what else ""
    return Stop(PeerLost(f"{told}: {gone}{reason}", remedy=remedy, rank=rank, step=step, peers=tuple(peers)))
