"""`import echelon.torch_backend` makes "echelon" a backend of torch.distributed.

    import echelon.torch_backend
    torch.distributed.init_process_group("echelon")

Works under torchrun or anything else that torch's own backends start under. Inside a run of ours a lost operation
completes with zeros and the step is marked lost; elsewhere waiting for it raises.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from echelon import start
from echelon.backend.process_group import ProcessGroup, devices
from echelon.backend.request import OnLost
from echelon.clock import Deadline
from echelon.comm.group import Lost
from echelon.comm.through_store import make

NAME = "echelon"


def create(options: Any, backend_options: Any = None) -> ProcessGroup:
    """Called by torch for the default group and for each new one. Blocks until all its ranks have come."""
    timeout: timedelta = options.timeout
    deadline = Deadline.after(timeout.total_seconds())
    name = f"torch-{options.group_id or 'default'}"
    group = make(options.store, options.group_rank, options.group_size, name, deadline)
    return ProcessGroup(group, options.store, name, timeout, _on_lost())


def _on_lost() -> OnLost | None:
    """In a run of ours, what marks its step as lost."""
    run = start.current()
    if run is None:
        return None

    def lose(lost: Lost) -> None:
        run.machine.side_losses.append(lost)

    return lose


def register() -> None:
    """Once is enough; the import does it."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=devices())


register()
