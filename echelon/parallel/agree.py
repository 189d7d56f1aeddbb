"""Do all ranks call the same thing? Told in the wire of the call itself, before a wrong sum could be believed.

gloo matches operations of one kind by their order alone: of two that differ in size one rank aborts and the other gets
garbage; two of one size are added up. So every call of a script begins with one small all-gather of a fixed size that
carries a mark of the call, and the values too if they fit, in which case the mark costs nothing.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from echelon import activity
from echelon.clock import Deadline
from echelon.comm.group import Group, Met, Outcome
from echelon.errors import LoopError

ROOM = 15
"""Values of 8 bytes (float64 or int64) that travel beside the mark."""

TEXT_BYTES = 400


def gathered(group: Group, what: str, values: Tensor, deadline: Deadline) -> tuple[Outcome, Tensor]:
    """Each rank's values (at most ROOM, float64 or int64, as many everywhere): row r is rank r's.

    Raises LoopError on all ranks if `what` differs among them. After Lost the rows are undefined.
    """
    mine = torch.zeros(1 + ROOM, dtype=torch.int64, device=values.device)
    mine[0] = zlib.crc32(what.encode())
    mine[1 : 1 + len(values)] = values.view(torch.int64)
    every = mine.new_zeros(group.size, 1 + ROOM)
    outcome = group.all_gather(every, mine).wait(deadline)
    if isinstance(outcome, Met) and len(set(every[:, 0].tolist())) > 1:
        raise _differs(group, what, deadline)
    return outcome, every[:, 1 : 1 + len(values)].contiguous().view(values.dtype)


def ask(group: Group, what: str, deadline: Deadline) -> Outcome:
    """The same without values, ahead of an operation whose values do not fit."""
    return gathered(group, what, torch.zeros(0, dtype=torch.int64), deadline)[0]


def _differs(group: Group, what: str, deadline: Deadline) -> LoopError:
    """All ranks see it in the same operation, so all ask where the others are."""
    text = f"{what} at {activity.own_site()}".encode()[:TEXT_BYTES]
    mine = torch.tensor(list(text.ljust(TEXT_BYTES)), dtype=torch.uint8)
    every = torch.zeros(group.size, TEXT_BYTES, dtype=torch.uint8)
    group.all_gather(every, mine).wait(deadline)
    places: dict[str, list[int]] = {}
    for rank, row in enumerate(every.tolist()):
        places.setdefault(bytes(row).decode(errors="replace").strip(), []).append(rank)
    where = "; ".join(
        f"worker {', '.join(map(str, ranks))} called {place}" for place, ranks in places.items()
    )
    return LoopError(
        f"the workers are in different collectives: {where}",
        remedy="All workers make the same calls in the same order, with values of one type and shape.",
    )
