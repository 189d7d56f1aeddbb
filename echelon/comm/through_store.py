"""A Group whose ranks meet through torch's store: what stands under the PyTorch backend.

The store is the boundary of trust: whoever can speak to it can join the group.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from echelon.clock import Deadline
from echelon.comm.alone import AloneGroup
from echelon.comm.group import Group, Lost
from echelon.comm.over_torch import TorchGroup
from echelon.errors import WorldError


def make(store: Store, rank: int, size: int, name: str, deadline: Deadline) -> Group:
    """The Group of these ranks. Blocks until all of them have come; WorldError when they have not by the deadline.

    Every rank calls this with a store that shows it the same keys (and no other group's), and with the same name, which
    is what people read when somebody is waited for in it.
    """
    if size == 1:
        return AloneGroup()
    limit = timedelta(seconds=max(0.001, deadline.left_s))
    gloo: Any = ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, limit)
    group = TorchGroup(gloo, torch.device("cpu"), name=name, timed=True)
    outcome = group.barrier().wait(
        deadline
    )  # whoever left now would close connections that others still make
    if isinstance(outcome, Lost):
        raise WorldError(
            f"the {size} ranks of group {name} did not come together: {outcome.reason}",
            remedy="Look at the output of the other ranks: one of them died, or never made this group.",
        )
    return group
