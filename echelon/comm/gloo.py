"""gloo on one address. By interface alone it would take the first address there, IPv4 before IPv6, whatever the others
can reach; torch passes no device through init_process_group, so its constructor is stood in for while a group is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

from echelon.errors import WorldError


@contextlib.contextmanager
def bound_to(address: str) -> Iterator[None]:
    """Groups of gloo that are made inside listen on `address` and nothing else. Not thread-safe, as torch's set-up is not."""
    plain: Any = distributed_c10d.ProcessGroupGloo

    class OnAddress(plain):  # type: ignore[misc]
        def __init__(self, store: distributed_c10d.Store, rank: int, size: int, timeout: timedelta) -> None:
            options = plain._Options()
            options._devices = [device(address)]
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnAddress  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = plain  # type: ignore[misc]


def device(address: str) -> Any:
    """gloo's device at `address`; WorldError when gloo cannot listen there."""
    try:
        return distributed_c10d.ProcessGroupGloo.create_device(hostname=address)
    except RuntimeError as error:
        raise WorldError(
            f"gloo cannot listen on {address}: {str(error).splitlines()[0]}",
            remedy="Choose another network with --listen ADDR on the first host and `join --interface I` on this one.",
        ) from None
