"""Where each gradient lies in the messages of an all-reduce: learned from the first step, kept in checkpoints.

gloo adds up three and more ranks in an order that depends on an element's place in its message. So the places are part of
what makes a resumed run give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from echelon.clock import Deadline
from echelon.comm.group import Met

if TYPE_CHECKING:
    from echelon.parallel.allreduce import AllReduceSync


def layout(sync: AllReduceSync) -> dict[str, Any]:
    """The places as plain data."""
    return {
        "slots": len(sync.slots),
        "order": sync.order,
        "active": [s.index for s in sync.active],
        "idle": [s.idle for s in sync.slots],
        "meetings": sync.meetings,
    }


def lay(sync: AllReduceSync, layout: dict[str, Any]) -> None:
    """Back to places of before; those of other parameters are ignored. Only between steps."""
    if layout.get("slots") != len(sync.slots):
        return
    sync.order, sync.meetings = layout["order"], layout["meetings"]
    for slot, idle in zip(sync.slots, layout["idle"], strict=True):
        slot.idle = idle
    sync.build([sync.slots[i] for i in layout["active"]])


def learn(sync: AllReduceSync, deadline: Deadline) -> None:
    """After the first step: buckets in the order in which rank 0's backward made gradients, if it had one."""
    assert sync.order is not None
    chosen = [s.index for s in sync.active]
    seen = [i for i in dict.fromkeys(sync.order) if i in set(chosen)]
    rest = (i for i in chosen if i not in set(seen))
    order = torch.tensor([len(seen), *seen, *rest], device=sync.tail.device)
    if not isinstance(sync.group.broadcast(order).wait(deadline), Met):
        return
    known, *ranks = order.tolist()
    if known:
        sync.order = None
        sync.build([sync.slots[i] for i in ranks])
