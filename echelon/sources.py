"""Where a resumed run goes on from: what --resume and run.resume() may name, found by rank 0 and heard by the others."""

from __future__ import annotations

import json
import re
from pathlib import Path

from echelon import env
from echelon.checkpoint import load
from echelon.clock import Deadline
from echelon.control.member import Member
from echelon.errors import CheckpointError

_STEP = re.compile(r"step-\d+/?$")
FIND_S = 120.0


def agree(
    member: Member | None, rank: int, source: str, target: str, run: str, elsewhere: str
) -> tuple[str, list[str]]:
    """The checkpoint to go on from and what rank 0 has to say about newer ones: rank 0 looks, the others hear."""
    if member is None:
        return find(source, target, run, elsewhere)
    key = f"resume/{source or target}"
    if rank == 0:
        try:
            found = json.dumps({"found": find(source, target, run, elsewhere)})
        except CheckpointError as error:
            found = json.dumps({"error": error.message, "remedy": error.remedy})
        member.call("store.set", Deadline.after(FIND_S), key=key, value=found.encode())
    else:
        wire = member.dial()
        try:
            value = wire.call(
                "store.get", Deadline.after(FIND_S), key=key, timeout_s=FIND_S, term=member.term
            )
        finally:
            wire.close()
        found = bytes(value).decode()
    answer = json.loads(found)
    if "error" in answer:
        raise CheckpointError(answer["error"], remedy=answer["remedy"])
    return answer["found"][0], answer["found"][1]


def find(source: str, target: str, run: str, elsewhere: str) -> tuple[str, list[str]]:
    """A source is a checkpoint, a folder or URL of checkpoints, a run's folder or name; "" is this run's own (`target`)."""
    notes: list[str] = []
    for place in _places(source or target, run, elsewhere):
        if _STEP.search(place) or Path(place).is_file():
            return str(load.open_saved(place).path), notes  # or says what is wrong with it
        saved, incomplete = load.latest(place)
        notes += incomplete
        if saved is not None:
            tail = f"; going on from step {saved.step}" if incomplete else ""
            return str(saved.path), [note + tail for note in notes]
    return "", notes


def _places(where: str, run: str, elsewhere: str) -> list[str]:
    """`elsewhere` is the strategy's checkpoint_dir."""
    if "://" in where:
        return [where, f"{where.rstrip('/')}/{run}"]
    path = Path(where)
    named = env.runs_dir() / where
    found = [str(path), str(path / "checkpoints")]
    if not path.exists() and named.exists():
        found = [str(named), str(named / "checkpoints")]
    if elsewhere:
        found.append(f"{elsewhere.rstrip('/')}/{path.name}")
    return found
